"""Functions of one's own in training, tried on small batches of the kinds that runs meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import PluginError
from rlcore.plugins import TRAINING, Kind
from rlcore.sample import Sample, Status
from rlcore.train.custom import Functions, Given

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 11
FAR = 20.0
"""Nats between two policies that have nothing to do with each other any more."""
Trial = Callable[[Functions, int], "list[Tensor] | list[float]"]


def try_training(spec: str, kind: Kind) -> Iterator[tuple[str, str | None]]:
    """What is tried, and what is wrong with it where something is."""
    setting = next(name for name, one in TRAINING.items() if one == kind)
    own = Functions(AlgorithmConfig(**{setting: spec, "use_tis": kind == "tis"}))  # type: ignore[arg-type]
    trials: dict[Kind, dict[str, Trial]] = {
        "reward_post_process": {"groups, one of equal rewards": _numbers},
        "convert_samples": {"groups, one of equal rewards": _converted},
        "advantage": _by_gap(_advantages),
        "tis": _by_gap(_weights),
        "pg_loss_reducer": {
            "normalised by sequences": lambda own, seed: _reduced(own, seed, per_token=False),
            "normalised by tokens": lambda own, seed: _reduced(own, seed, per_token=True),
        },
        "loss": _by_gap(_loss),
    }
    for what, trial in trials[kind].items():
        try:
            made = [trial(own, 0) for _ in range(2)]
        except PluginError as error:
            yield what, str(error)
            continue
        same = all(_equal(a, b) for a, b in zip(*made, strict=True))
        other = "other numbers from the same batch, so a step that is done again would differ"
        yield what, None if same else other


def _by_gap(trial: Callable[[Functions, int, float], list[Tensor]]) -> dict[str, Trial]:
    return {
        "samples of several lengths": lambda own, seed: trial(own, seed, 0.1),
        "policies that are far apart": lambda own, seed: trial(own, seed, FAR),
    }


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) if isinstance(a, float) else bool((a == b).all())


# --- material -------------------------------------------------------------------------------------


def batch(seed: int, gap: float) -> Given:
    """Three samples, one with a hole in its mask and one of a single token."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    totals, lengths = [6, 8, 4], [4, 5, 1]

    def column(size: float, at: float = 0.0) -> list[Tensor]:
        return [torch.randn(n, generator=draw) * size + at for n in lengths]

    masks = [torch.ones(n) for n in lengths]
    masks[1][2] = 0.0
    given = Given(
        total_lengths=totals,
        response_lengths=lengths,
        loss_masks=masks,
        rewards=[1.0, -1.0, 0.0],
        log_probs=column(0.5, -2.0),
        kl=[torch.zeros(n) for n in lengths],
        advantages=column(1.0),
        values=column(1.0),
        tokens=[torch.randint(VOCABULARY, (n,), generator=draw) for n in totals],
    )
    for name in ("rollout_log_probs", "ref_log_probs"):
        noise = column(gap)
        given[name] = [a + b for a, b in zip(given["log_probs"], noise, strict=True)]
    given["returns"] = given["advantages"]
    return given


# --- trials ---------------------------------------------------------------------------------------


def _samples() -> list[Sample]:
    """Two groups of four."""
    rewards = [0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5]
    return [
        Sample(
            group_index=k // 4,
            index=k,
            prompt_id=f"p{k // 4}",
            prompt="What is 6 x 7?",
            tokens=[1, 2, 3],
            response="42",
            response_length=2,
            label="42",
            reward=reward,
            rollout_log_probs=[-0.5, -1.0],
            status=Status.COMPLETED,
        )
        for k, reward in enumerate(rewards)
    ]


def _numbers(own: Functions, seed: int) -> list[float]:
    return own.numbers(_samples())


def _converted(own: Functions, seed: int) -> list[float]:
    made = own.sequences(_samples())
    if not any(s.trainable_tokens for s in made):
        raise PluginError("no sequence that it makes has a token to train on")
    rows = [(len(s.tokens), s.trainable_tokens, s.advantages, *s.tokens) for s in made]
    return [float(x) for row in rows for x in row]


def _advantages(own: Functions, seed: int, gap: float) -> list[Tensor]:
    data = batch(seed, gap)
    masks = data["loss_masks"]
    del data["advantages"], data["returns"]
    found = own.advantages(data, masks, with_returns=False)[0]
    return [values[mask != 0] for values, mask in zip(found, masks, strict=True)]


def _weights(own: Functions, seed: int, gap: float) -> list[Tensor]:
    import torch

    given = batch(seed, gap)
    loss = torch.cat(given["advantages"]).requires_grad_()
    arguments = Given(
        train_log_probs=given["log_probs"],
        rollout_log_probs=given["rollout_log_probs"],
        loss_masks=given["loss_masks"],
        total_lengths=given["total_lengths"],
        response_lengths=given["response_lengths"],
    )
    weighed, masks, _ = own.weighed(loss, arguments, given["loss_masks"])
    trained = torch.cat(given["loss_masks"]) != 0
    if not weighed.requires_grad:
        raise PluginError("the loss that it returns has no gradient; it must be made of pg_loss")
    return [weighed.detach()[trained], torch.cat(masks)[trained]]


def _reduced(own: Functions, seed: int, *, per_token: bool) -> list[Tensor]:
    import torch

    given = batch(seed, 0.1)
    arguments = Given(
        total_lengths=given["total_lengths"],
        response_lengths=given["response_lengths"],
        masks=given["loss_masks"],
        per_token=per_token,
    )
    loss = torch.cat(given["advantages"]).requires_grad_()
    reduced = own.reducer(arguments)(loss)
    if not reduced.requires_grad:
        raise PluginError("the reduced loss has no gradient; it must be made of what it is given")
    return [reduced.detach()]


def _loss(own: Functions, seed: int, gap: float) -> list[Tensor]:
    import torch

    given = batch(seed, gap)
    given["unconcat_tokens"] = given["tokens"]
    given["tokens"] = torch.cat(given["tokens"])[None]
    draw = torch.Generator().manual_seed(seed)
    shape = (1, sum(given["total_lengths"]), VOCABULARY)
    logits = torch.randn(shape, generator=draw).requires_grad_()
    mask = torch.cat(given["loss_masks"])

    def mean(values: Tensor) -> Tensor:
        if values.shape != mask.shape:
            raise ValueError(
                f"sum_of_sample_mean got values of shape {tuple(values.shape)}; it takes one for "
                f"each of the {len(mask)} response tokens, end to end"
            )
        return torch.where(mask != 0, values, torch.zeros(())).sum() / mask.sum()

    loss, _ = own.loss(given, logits, mean)
    loss.backward()
    gradient = logits.grad
    if gradient is None or not bool(torch.isfinite(gradient).all()):
        raise PluginError("its gradient is not finite")
    return [loss.detach(), gradient]
