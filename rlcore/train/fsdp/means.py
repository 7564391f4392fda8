"""What a batch is like before its first step, as figures by slime's names: means over its trained
tokens, and how fast it was trained.

Invariants:
- Means are weighted as the loss of their step is, steps count alike, and all ranks and
  micro-batches come to the same number as one would.
- A figure that was not computed is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms.flops import ModelShape, forward_flops
from rlcore.algorithms.metrics import masked
from rlcore.train.fsdp.credit import MicroBatch
from rlcore.train.ranks import Ranks
from rlcore.train.trainer import TrainBatch

LOG_PROBS = "rollout/log_probs"
"""Of the trainer, before the first step."""


def token_mean(micro: MicroBatch, values: Tensor) -> Tensor:
    """The share of a micro-batch in the mean over its step of values [M]."""
    return (masked(values.detach(), micro.pick("loss_mask")) * micro.pick("loss_weights")).sum()


def token_means(
    steps: Sequence[Sequence[MicroBatch]], ranks: Ranks, *, own_old: bool
) -> dict[str, float]:
    """Means of all that is known of the tokens.

    Args:
        steps: of the batch, the same number on all ranks.
        ranks: that the batch is dealt out to.
        own_old: whether old log-probs are the trainer's own, not the engine's.
    """
    sums: dict[str, Tensor] = {}
    for micro in (micro for step in steps for micro in step):
        for name, values in _columns(micro, own_old=own_old):
            share = token_mean(micro, values).double()
            sums[name] = sums[name] + share if name in sums else share
    if not sums:
        return {}
    total = torch.stack(list(sums.values())) / len(steps)
    ranks.add(total)
    return dict(zip(sums, total.tolist(), strict=True))


def _columns(micro: MicroBatch, *, own_old: bool) -> Iterator[tuple[str, Tensor]]:
    """What a micro-batch knows of its tokens, [M] each; the same names on all ranks."""
    engine = micro.packed.rollout_log_probs
    for name, values in (
        (LOG_PROBS, micro.old if own_old else None),
        ("rollout/rollout_log_probs", None if engine is None else micro.pick("rollout_log_probs")),
        ("rollout/ref_log_probs", micro.ref),
        ("rollout/teacher_log_probs", micro.teacher),
        ("rollout/opd_reverse_kl", micro.behind),
        ("rollout/kl", micro.kl),
        ("rollout/values", micro.values),
        ("rollout/returns", micro.returns),
        ("rollout/advantages", micro.advantages),
    ):
        if values is not None:
            yield name, values


def throughput(
    batch: TrainBatch,
    shape: ModelShape,
    seconds: dict[str, float],
    ranks: Ranks,
    *,
    passes: int,
    all_logits: bool,
) -> dict[str, float]:
    """Times, tokens and operations a second, by slime's names.

    Operations are those that the model needs: activations that are computed again do not count, nor
    does an output layer at tokens that are not trained. TFLOP/s are of one rank, on average.

    Args:
        batch: this rank's share.
        shape: of the model.
        seconds: by phase, as the loop names them.
        ranks: that the batch is dealt out to.
        passes: that training is worth, in forward passes of the model.
        all_logits: whether the output layer is applied at all tokens.
    """
    train = seconds.get("seconds_forward_backward", 0.0) + seconds.get("seconds_optimizer", 0.0)
    if not train:
        return {}
    own = [s for step in batch.steps for micro in step.micro_batches for s in micro]
    flops = torch.tensor(
        sum(
            forward_flops(len(s.tokens), shape, None if all_logits else s.trainable_tokens)
            for s in own
        ),
        dtype=torch.float64,
    )
    ranks.add(flops)
    world = dist.get_world_size()
    each = flops.item() / world / 1e12
    out = {
        "perf/actor_train_time": train,
        "perf/actor_train_tflops": passes * each / train,
        "perf/actor_train_tok_per_s": batch.tokens / train,
        "perf/actor_train_tokens_per_gpu_per_sec": batch.tokens / train / world,
    }
    for name in ("log_probs", "ref_log_probs"):
        if taken := seconds.get(f"seconds_{name}"):
            out |= {f"perf/{name}_time": taken, f"perf/{name}_tflops": each / taken}
    return out
