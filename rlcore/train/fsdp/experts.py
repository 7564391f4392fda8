"""How evenly a mixture of experts is used: tokens by expert, counted as training passes through.

Invariants: a token counts once however often activations are computed again, and one that only
keeps a rank company does not; a model without experts has no figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.train.expert_load import load_figures


class ExpertLoad:
    """Counts the tokens of each expert in each layer of a model.

    transformers calls the experts of a layer with hidden states and the indices [T, k] that its
    router chose.
    """

    def __init__(self, lm: nn.Module) -> None:
        self.first: int | None = None
        """How many tokens of what passes count: the first ones; None: all."""
        self._counting = False
        self._counts: dict[int, Tensor] = {}
        self._layers = [
            m for m in lm.modules() if isinstance(getattr(m, "gate_up_proj", None), nn.Parameter)
        ]
        for k, experts in enumerate(self._layers):
            experts.register_forward_pre_hook(self._counter(k), with_kwargs=True)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._counts = {}

    @contextmanager
    def counting(self, *, real: bool) -> Iterator[None]:
        """Count what passes within the block, if it is `real`."""
        self._counting = real
        try:
            yield
        finally:
            self._counting = False

    def figures(self) -> dict[str, float]:
        """Over all ranks since the last reset; the same on every rank."""
        if not self._layers:
            return {}
        rows = [self._counts.get(k, self._none(k)) for k in range(len(self._layers))]
        counts = torch.stack(rows)
        dist.all_reduce(counts)
        return load_figures(counts)

    def _none(self, layer: int) -> Tensor:
        experts: Any = self._layers[layer]
        device = experts.gate_up_proj.device
        return torch.zeros(experts.num_experts, dtype=torch.int64, device=device)

    def _counter(self, layer: int) -> Any:
        @torch.no_grad()
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._counting:
                return
            chosen = (kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])[: self.first]
            chosen = chosen.flatten()
            held = self._counts.setdefault(layer, self._none(layer))
            held.scatter_add_(0, chosen, torch.ones_like(chosen))

        return count
