"""The example's reward."""

from rlcore.sample import Sample


async def reward(args: object, sample: Sample, **kwargs: object) -> float:
    """1 for the right number and nothing else, 0.2 for a number, 0 for what is none."""
    if sample.response == sample.label:
        return 1.0
    return 0.2 if sample.response.isdecimal() else 0.0
