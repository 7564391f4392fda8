"""Log-probs of a teacher that an SGLang server holds, for on-policy distillation.

The server answers at temperature 1, and reads the token ids of the samples: its model must have the
policy's vocabulary.
"""

import asyncio
from collections.abc import Iterator, Sequence

from rlcore.config.rollout import RolloutConfig
from rlcore.errors import EngineError
from rlcore.rollout.client import EngineClient, EngineUnavailable
from rlcore.rollout.together import all_of
from rlcore.sample import Sample

SETTING = "rollout.teacher_url"
TOKENS_A_CALL = 16_384
CALLS_AT_ONCE = 8
FIRST_PAUSE_S = 0.5


async def ask_teacher(samples: Sequence[Sample], config: RolloutConfig) -> None:
    """Set `teacher_log_probs` of samples that have a response.

    Args:
        samples: of a rollout.
        config: names the server, and how long and how often it is asked.

    Raises:
        EngineError: it does not answer, or cannot score a sample.
    """
    assert config.teacher_url is not None
    room = asyncio.Semaphore(CALLS_AT_ONCE)
    async with EngineClient(config.teacher_url, timeout_s=config.request_timeout_s) as client:

        async def one(part: list[Sample]) -> None:
            async with room:
                found = await _log_probs(client, part, config.request_retries)
            for sample, log_probs in zip(part, found, strict=True):
                sample.teacher_log_probs = log_probs[-sample.response_length :]

        await all_of(one(part) for part in _parts([s for s in samples if s.response_length]))
    for sample in samples:
        if not sample.response_length:
            sample.teacher_log_probs = []


def _parts(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Neighbours that are sent in one call."""
    part: list[Sample] = []
    tokens = 0
    for sample in samples:
        if part and tokens + len(sample.tokens) > TOKENS_A_CALL:
            yield part
            part, tokens = [], 0
        part.append(sample)
        tokens += len(sample.tokens)
    if part:
        yield part


async def _log_probs(client: EngineClient, part: list[Sample], retries: int) -> list[list[float]]:
    for left in reversed(range(retries + 1)):
        try:
            return await client.prompt_log_probs([sample.tokens for sample in part])
        except EngineUnavailable as error:
            if not left:
                raise EngineError(
                    f"{SETTING} = {client.url!r}: the teacher does not answer ({error}); start it, "
                    "then resume the run"
                ) from error
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (retries - left))
        except EngineError as error:
            raise EngineError(
                f"{SETTING} = {client.url!r}: the teacher cannot score sample {part[0].index} and "
                f"those after it, whose token ids must be its own ({error})"
            ) from error
    raise AssertionError("unreachable")
