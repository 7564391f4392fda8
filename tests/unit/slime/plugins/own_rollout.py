"""A rollout function as slime's users write them: plain, with a loop of its own inside."""

import asyncio

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run


async def make(args, data_source):
    state = GenerateState(args)
    groups = data_source.get_samples(args.rollout_batch_size)
    tasks = [
        generate_and_rm_group(args, group, state.sampling_params.copy(), evaluation=False)
        for group in groups
    ]
    return await asyncio.gather(*tasks)


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        return RolloutFnEvalOutput(data={})
    groups = run(make(args, data_source))
    groups.sort(key=lambda group: group[0].index or 0)
    return RolloutFnTrainOutput(samples=list(groups), metrics={"rollout/mine": rollout_id + 1})
