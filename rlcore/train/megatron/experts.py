"""Experts whose matrix products are made together, by torch: `megatron.moe_grouped_gemm`.

megatron-core makes them with Transformer Engine or the package grouped_gemm. Here the experts are
its sequential ones, each with its own weights under its own name, so loading, states, optimizer and
exports are the same; only where the weights lie and how they are multiplied is another thing.

Invariants:
- The weights of a rank's experts lie one behind the other, so that one tensor shows them all. Where
  they do not lie evenly, since an optimizer has moved them, they are copied together as long as a
  product takes.
- What torch cannot multiply together (rows that are no multiples of 16 bytes; on a GPU, all but
  bfloat16 and any that is older than Ampere) megatron-core computes one expert after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

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
            for weights in map(weights_of, (module.first, module.second)):
                whole = torch.stack([weight.data for weight in weights])
                for weight, place in zip(weights, whole, strict=True):
                    weight.data = place


def weights_of(projections: Sequence[Any]) -> list[nn.Parameter]:
    """One each."""
    return [projection.weight for projection in projections]


class GroupedExperts(SequentialMLP):
    """The experts of a layer that this rank has."""

    @property
    def first(self) -> list[nn.Module]:
        """Projections [2 width, hidden] of each: gate and up."""
        return [expert.linear_fc1 for expert in self.local_experts]

    @property
    def second(self) -> list[nn.Module]:
        """Projections [hidden, width] of each: down."""
        return [expert.linear_fc2 for expert in self.local_experts]

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
        first, second = weights_of(self.first), weights_of(self.second)
        if not len(hidden) or not self._can(hidden, first[0], second[0]):
            return cast(tuple[Tensor, None], super().forward(hidden, counts, probs))
        for projection in (*self.first, *self.second):
            # Who has weights come in before a module is called waits for them now.
            for hook in projection._forward_pre_hooks.values():
                hook(projection, ())
        ends = counts.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        gate, up = _products(hidden, first, ends).chunk(2, -1)
        mixed = (functional.silu(gate) * up * probs[:, None]).to(hidden.dtype)
        return _products(mixed, second, ends), None

    def _can(self, hidden: Tensor, *weights: Tensor) -> bool:
        """Whether torch can multiply these all at once."""
        if any(getattr(self.config, name, None) for name in ANOTHER_WAY):
            return False
        if hidden.is_cuda and (
            hidden.dtype != torch.bfloat16
            or torch.cuda.get_device_capability(hidden.device) < AMPERE
        ):
            return False
        return all(w.shape[1] * w.element_size() % ALIGNMENT == 0 for w in weights)


def _products(x: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """[T, out] of [T, in] by weights [out, in], that of expert e up to row `ends[e]`."""
    return cast(Tensor, _Products.apply(x, ends, *weights))


class _Products(torch.autograd.Function):
    """`_products`; nothing is kept for backward but what there is anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return functional.grouped_mm(x, together(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_x = functional.grouped_mm(grad, together(weights), offs=ends)
        of_weights = functional.grouped_mm(grad.t(), x, offs=ends)
        return of_x, None, *of_weights.unbind(0)


def together(weights: Sequence[Tensor]) -> Tensor:
    """Weights [out, in] as one tensor [experts, out, in]: in place, where they lie evenly."""
    first = weights[0].data
    storage = first.untyped_storage().data_ptr()
    begins = [weight.storage_offset() for weight in weights]
    step = begins[1] - begins[0] if len(begins) > 1 else first.numel()
    even = all(begin == begins[0] + k * step for k, begin in enumerate(begins))
    same = all(weight.untyped_storage().data_ptr() == storage for weight in weights)
    if not (even and same) or step <= 0:
        return torch.stack([weight.data for weight in weights])
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))
