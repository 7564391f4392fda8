"""Experts whose matrix products are made together, by torch: `megatron.moe_grouped_gemm`.

megatron-core makes them with Transformer Engine or the package grouped_gemm. Here the experts are
its sequential ones, each with its own weights under its own name, so loading, states, optimizer and
exports are the same; only where the weights lie and how they are multiplied is another thing.

Invariants:
- The weights of a rank's experts lie one behind the other, so that one tensor shows them all; where
  they no longer do, they are copied together for each product.
- What torch cannot multiply together (rows that are no multiples of 16 bytes, a GPU older than
  Ampere) megatron-core computes one expert after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.nn.functional import silu

ALIGNMENT = 16
"""Bytes of which the rows of weights must be multiples."""
AMPERE = (8, 0)
ANOTHER_WAY = ("fp8", "fp4", "moe_apply_probs_on_input", "activation_func_clamp_value")
"""Settings of megatron-core under which it computes experts otherwise."""


def grouped(spec: Any) -> Any:
    """megatron-core's specification of experts, with these in their place."""
    if isinstance(spec, partial):
        # A function with arguments from 0.19 on.
        return partial(GroupedExperts, **spec.keywords)
    spec.module = GroupedExperts
    return spec


def lay_together(model: GPTModel) -> None:
    """Have the weights of each layer's experts lie one behind the other."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            for weights in (module.first, module.second):
                whole = torch.stack([weight.data for weight in weights])
                for weight, place in zip(weights, whole, strict=True):
                    weight.data = place


class GroupedExperts(SequentialMLP):
    """The experts of a layer that this rank has."""

    @property
    def first(self) -> list[nn.Parameter]:
        """[2 width, hidden] of each: gate and up."""
        return [expert.linear_fc1.weight for expert in self.local_experts]

    @property
    def second(self) -> list[nn.Parameter]:
        """[hidden, width] of each: down."""
        return [expert.linear_fc2.weight for expert in self.local_experts]

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """What experts make of tokens [T, hidden], one expert's behind the other's, multiplied by
        their probabilities [T]; megatron-core's names.
        """
        hidden, counts, probs = permuted_local_hidden_states, tokens_per_expert, permuted_probs
        first, second = self.first, self.second
        if not len(hidden) or not self._can(hidden, first[0], second[0]):
            return cast(tuple[Tensor, None], super().forward(hidden, counts, probs))
        ends = counts.to(hidden.device).cumsum(0, dtype=torch.int32)
        gate, up = _products(hidden, first, ends).chunk(2, -1)
        mixed = (silu(gate) * up * probs[:, None]).to(hidden.dtype)
        return _products(mixed, second, ends), None

    def _can(self, hidden: Tensor, *weights: Tensor) -> bool:
        """Whether torch can multiply these together."""
        if any(getattr(self.config, name, None) for name in ANOTHER_WAY):
            return False
        if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < AMPERE:
            return False
        return all(w.shape[1] * w.element_size() % ALIGNMENT == 0 for w in weights)


def _products(x: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """[T, out] of [T, in] by weights [out, in], that of expert e up to row `ends[e]`."""
    whole = cast(Tensor, _Together.apply(*weights))
    return nn.functional.grouped_mm(x, whole.transpose(1, 2), offs=ends)


class _Together(torch.autograd.Function):
    """Weights [out, in] as one tensor [experts, out, in]."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        first, size = weights[0].data, weights[0].numel()
        storage, begin = first.untyped_storage().data_ptr(), first.storage_offset()
        for k, weight in enumerate(weights):
            if (
                weight.untyped_storage().data_ptr() != storage
                or weight.storage_offset() != begin + k * size
            ):
                return torch.stack(weights)
        return first.as_strided((len(weights), *first.shape), (size, *first.stride()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0].unbind(0)
