"""Two agents that share a policy: one half of a group proposes, the other half checks.

Every sample of the group is trained on, each for what its own agent said: a checker has the
proposal, which another sample said, as tokens with mask 0.
"""

import asyncio
from typing import Any

from rlcore.rollout.generate import apply_result
from rlcore.sample import Sample, Status

Params = dict[str, Any]
ASKED = "!"
"""What comes between a proposal and the verdict: `y` or `n`."""


async def generate(args: Any, samples: list[Sample], sampling_params: list[Params]) -> list[Sample]:
    """The k-th proposer's proposal goes to the k-th checker; the first accepted one is the team's.

    `team` in the metadata is what the team says: None where the checkers accepted nothing.
    """
    half = len(samples) // 2
    proposers, checkers = samples[:half], samples[half:]
    await asyncio.gather(*map(speak, [args] * half, proposers, sampling_params))
    for proposer, checker in zip(proposers, checkers, strict=True):
        proposer.metadata["role"], checker.metadata["role"] = "proposer", "checker"
        checker.metadata["proposal"] = proposer.response
        if not checker.response_length:
            # The ids that were sampled, not their text: no id changes on the way.
            checker.append_response_tokens(
                proposer.response_tokens, trainable=False, text=proposer.response
            )
            question = args.tokenizer.encode(ASKED, add_special_tokens=False)
            checker.append_response_tokens(question, trainable=False, text=ASKED)
    await asyncio.gather(*map(speak, [args] * half, checkers, sampling_params[half:]))
    accepted = [c.metadata["proposal"] for c in checkers if c.response.endswith(ASKED + "y")]
    for sample in samples:
        sample.metadata["team"] = accepted[0] if accepted else None
    return samples


async def speak(args: Any, sample: Sample, params: Params) -> None:
    """One token of a sample's agent."""
    if sample.status == Status.COMPLETED:
        return
    apply_result(sample, await args.generate(sample.tokens, params | {"max_new_tokens": 1}))
    if sample.status == Status.TRUNCATED:
        # One token is all that it was to say.
        sample.status = Status.COMPLETED


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for a proposer that is right, and for a checker whose verdict is.

    Both are scored in one group, whose mean is then the baseline of both. That adds variance and no
    bias: a baseline may be any number that does not depend on the sample's own tokens.
    """
    if sample.metadata["role"] == "proposer":
        return float(sample.response == sample.label)
    right = sample.metadata["proposal"] == sample.label
    return float(sample.response.rpartition(ASKED)[2] == ("y" if right else "n"))
