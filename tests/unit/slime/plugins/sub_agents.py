"""A generate function of slime's that trains on two agents: one execution, two samples."""

from copy import deepcopy

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> list[Sample]:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    made = []
    for role in ("=", "=="):
        prompt = sample.prompt + role
        ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        output = await post(
            url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
        )
        part = deepcopy(sample)
        part.rollout_id = sample.index
        part.tokens = list(ids)
        pairs = output["meta_info"]["output_token_logprobs"]
        part.append_response_tokens(
            [item[1] for item in pairs],
            [item[0] for item in pairs],
            text=output["text"],
            meta_info=output["meta_info"],
        )
        made.append(part)
    made[0].reward = {"score": 0.25, "turns": 1}
    return made
