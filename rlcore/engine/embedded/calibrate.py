"""Two questions put to the model once, before it serves.

Does this engine compute what transformers computes? A model with something the engine does not know
(another attention, scaled logits) is refused instead of answered wrongly.

Which batch sizes give the same bits? Matrix kernels choose their order of summation by shape. The
sizes kept are those in which one row, put at several places among random others, comes out equal in
every bit; where none agree, rows are computed one by one.
"""

import logging

import torch
from torch import Tensor

from rlcore.engine.embedded import attention
from rlcore.engine.embedded.kv import Lane
from rlcore.engine.embedded.runner import PREFILL_TOKENS, ModelRunner, padded
from rlcore.errors import EngineError
from rlcore.images.layout import SequenceImages
from rlcore.images.trial import trial

log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest difference of two logits, relative to the largest logit; low precision: 0.1."""


def calibrate(runner: ModelRunner) -> None:
    """Check the model, and on CPU settle `runner.batch_sizes` and `runner.batched_prefill`."""
    generator = torch.Generator().manual_seed(0)
    _check_model(runner, generator)
    if runner.device.type != "cpu":
        return
    runner.batch_sizes = _agreeing_sizes(runner, generator)
    runner.batched_prefill = _prefill_agrees(runner, generator)
    if not runner.batched_prefill or len(runner.batch_sizes) == 1:
        log.warning(
            "matrix kernels of this machine give bits that depend on the batch: batched prefill "
            "%s, decode batches of %s",
            "on" if runner.batched_prefill else "off",
            runner.batch_sizes,
        )


def _tokens(runner: ModelRunner, generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(0, runner.vocab_size, (count,), generator=generator).tolist()


def _check_model(runner: ModelRunner, generator: torch.Generator) -> None:
    """Compare prefill and one decode step with the model's own forward."""
    _compare(runner, _tokens(runner, generator, min(24, runner.context_length)), None, {})
    if runner.sees:
        made = trial(runner.model)
        _compare(runner, made.tokens, made.images, made.forward)


@torch.inference_mode()
def _compare(
    runner: ModelRunner,
    tokens: list[int],
    images: SequenceImages | None,
    forward: dict[str, Tensor],
) -> None:
    runner.attend("sdpa")
    ids = torch.tensor([tokens], device=runner.device)
    reference = runner.model(ids, use_cache=False, **forward).logits[0]
    runner.attend(attention.NAME)
    prompt = runner.prefill([tokens[:-1]], [images])[0]
    lane = Lane(runner.kv_shape, runner.lane_length(len(tokens)))
    lane.append(torch.zeros(1, dtype=torch.long).numpy(), prompt.kv)
    device = runner.device
    last = runner.decode(
        lane,
        0,
        torch.tensor(tokens[-1:], device=device),
        torch.tensor([len(tokens) - 1], device=device),
        torch.tensor([0 if images is None else images.shift], device=device),
    )
    ours = torch.cat((prompt.logits[None], last))
    gap = (ours - reference[-2:].float()).abs().max() / reference.abs().max()
    if not gap < _TOLERANCE.get(runner.dtype, 0.1):
        raise EngineError(
            f"The embedded engine does not compute what transformers does for model type "
            f"'{runner.config.model_type}' (relative difference of logits {float(gap):.1e}); use "
            "rollout.engine = 'sglang' for this model."
        )


def _prefill_agrees(runner: ModelRunner, generator: torch.Generator) -> bool:
    """Whether a prompt read alone and among others gives the same bits."""
    for length, most in ((5, PREFILL_TOKENS), (40, 2)):
        if length >= runner.context_length:
            continue
        together = min(most, runner.prompts_together(padded(length)))
        prompts = [_tokens(runner, generator, length) for _ in range(together)]
        batch = runner.prefill(prompts)
        for at in {0, together - 1}:
            alone = runner.prefill([prompts[at]])[0]
            same = (
                torch.equal(alone.kv, batch[at].kv)
                and torch.equal(alone.hidden, batch[at].hidden)
                and torch.equal(alone.logits, batch[at].logits)
            )
            if not same:
                return False
    return True


def _agreeing_sizes(runner: ModelRunner, generator: torch.Generator) -> tuple[int, ...]:
    """The candidate sizes at which one row gives the same logits at every place tried, with the
    batch full and at its emptiest.
    """
    length = runner.shortest_lane
    row = torch.randn(runner.kv_shape.zeros(1, length).shape, generator=generator)
    token = _tokens(runner, generator, 1)[0]
    expected: Tensor | None = None
    agreeing: list[int] = []
    candidates = runner.batch_sizes
    smaller = 0
    for size in candidates:
        runner.batch_sizes = (size,)
        same = True
        for count in (smaller + 1, size):
            places = sorted({0, count // 2, count - 1})
            logits = _decode_at(runner, generator, row, token, count, places)
            expected = logits[0] if expected is None else expected
            same = same and all(torch.equal(logits[place], expected) for place in places)
        if same:
            agreeing.append(size)
        smaller = size
    runner.batch_sizes = candidates
    return tuple(agreeing) or (1,)


def _decode_at(
    runner: ModelRunner,
    generator: torch.Generator,
    row: Tensor,
    token: int,
    count: int,
    places: list[int],
) -> Tensor:
    """Logits of a step over `count` rows: `row` and `token` at `places`, random ones elsewhere."""
    length = row.shape[4]
    lane = Lane(runner.kv_shape, length)
    lane.reserve(count)
    lane.kv.copy_(torch.randn(row.shape, generator=generator))
    lane.kv[:, :, places] = row.to(runner.dtype)
    tokens = torch.tensor(_tokens(runner, generator, count))
    positions = torch.randint(0, length, (count,), generator=generator)
    tokens[places], positions[places] = token, length - 2
    return runner.decode(lane, 0, tokens, positions)
