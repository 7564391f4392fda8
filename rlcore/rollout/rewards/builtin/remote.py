"""The type `remote_rm`: a reward model behind HTTP."""

from typing import Any

from rlcore.rollout.rewards.builtin.http import post
from rlcore.rollout.rewards.protocol import NoRewardError
from rlcore.sample import Sample


async def remote_rm(args: Any, sample: Sample) -> Any:
    """What the server at `reward.rm_url` answers: a number, or an object with `reward.reward_key`.

    It is sent `prompt`, `response`, `label` and `metadata`.

    Raises:
        NoRewardError: there is no address, or no answer.
    """
    if not args.rm_url:
        raise NoRewardError("reward.rm_type = 'remote_rm' needs reward.rm_url")
    body = {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "metadata": sample.metadata,
    }
    return await post(
        args.rm_url,
        body,
        retries=args.retries,
        timeout_s=args.request_timeout_s or args.timeout_s,
        within_s=args.timeout_s,
    )
