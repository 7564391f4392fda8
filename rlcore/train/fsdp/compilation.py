"""What torch compiles of the FSDP2 trainer, and having it do so before the first batch.

Invariants:
- The code of a step serves micro-batches of any size and mix of lengths: after `make_code` nothing
  is compiled again, but for a micro-batch of a single token.
- `make_code` leaves weights, optimizer and random numbers as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import TrainSequence, pack
from rlcore.images.model import decoder
from rlcore.train.credit import MicroBatch
from rlcore.train.fsdp.model import Policy
from rlcore.train.fsdp.passes import Scorer
from rlcore.weights.experts import is_stacked

COMPILED_LENGTH = 256
"""Most tokens of a sequence for which the code of a step is made."""


def compile_layers(policy: Policy) -> None:
    """Have torch fuse what lies between the matrix products of each decoder layer; they share the
    code that is made. Layers with experts stay as they are, since what an expert gets varies.
    """
    if any(is_stacked(name) for name, _ in policy.weights()):
        return
    # Else a constant such as the epsilon of a norm is looked up at each call.
    torch._dynamo.config.specialize_float = True
    for layer in decoder(policy.lm.base_model).layers:
        # Its hooks, which gather weights, stay outside.
        layer.forward = torch.compile(layer.forward, dynamic=True)


def make_code(
    policy: Policy,
    frozen: Sequence[Scorer],
    device: torch.device,
    *,
    max_tokens: int,
    temperature: float,
    with_entropy: bool,
) -> None:
    """Pass micro-batches through the models as a batch will, the first as large as they may be.

    Args:
        policy: gets gradients, which are for the caller to drop.
        frozen: models that give log-probs alone.
        device: of all.
        max_tokens: of a micro-batch.
        temperature: of the rollout.
        with_entropy: whether the loss depends on the entropy.
    """
    length = max(3, min(COMPILED_LENGTH, max_tokens // 2))
    most = max(2, max_tokens // length)
    for count in (most, most - 1):
        lengths = [length - i % 2 for i in range(count)]
        batch = [TrainSequence([0] * n, n - 1) for n in lengths]
        totals = Totals.of(n - 1 for n in lengths)
        micro = MicroBatch.of(pack(batch, totals, "token_mean").inputs(), device)
        with torch.no_grad():
            for model in (Scorer(policy), *frozen):
                model.score([micro], temperature)
        log_probs, entropy = policy.score(micro.packed, micro.rows, temperature)
        used = log_probs + entropy if with_entropy else log_probs
        (used.sum() * 0.0).backward()
    policy.expert_load.reset()
