"""AdamW with float32 master weights and moments divided among the ranks that hold the same weights.

Weights and gradients lie in buckets (`rlcore.train.megatron.buffers`). Of each bucket a rank
updates its part, whatever weights that cuts; then ranks gather what came of it. Gradients add up in
float32 over the micro-batches of a step, and while the last of them is passed back also over ranks
that saw other samples or tokens. Then come tensor-parallel ranks where each saw a part of what a
weight acts on.

Invariants:
- Each element of the model counts once in the norm of the gradient, whatever the layout.
- The weights that compute are the master weights, rounded.
- A step is a function of masters, gradients, moments and the step count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from rlcore.config.tree import TrainConfig
from rlcore.train.megatron import parallel
from rlcore.train.megatron.buffers import Buffers, Place
from rlcore.train.megatron.stepping import HostSteps, Run, Stepped, Steps

Kind = Literal["model", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("model", "exp_avg", "exp_avg_sq")
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight of the model as this rank has it."""

    name: str
    parameter: nn.Parameter
    of_experts: bool = False
    """Whether it is one of experts, which other ranks have copies of."""
    is_share: bool = False
    """Whether tensor-parallel ranks have parts of it; else each has all of it."""
    acts_on_share: bool = False
    """Whether each tensor-parallel rank has it act on a part of what there is: on some heads, or
    some tokens.
    """
    repeated: bool = False
    """Whether another stage of the pipeline has it too, and counts it."""


@dataclass(eq=False)
class Piece:
    """What this rank updates of one weight: some of its elements, maybe none."""

    weight: Weight
    place: Place
    counts: bool
    """Whether the norm has its elements from this rank."""
    master: Tensor
    """float32, flat"""
    reduced: Tensor = field(default_factory=lambda: torch.empty(0))
    """The same elements of the gradient in float32, once it is collected."""

    @property
    def decays(self) -> bool:
        """See `Stepped`: vectors (norms, biases) do not."""
        return self.weight.parameter.ndim > 1

    @property
    def computes(self) -> Tensor:
        """See `Stepped`."""
        return self._own(self.weight.parameter.detach())

    @property
    def gradient(self) -> Tensor:
        """The same elements of the gradient."""
        return self._own(self.place.gradient)

    def _own(self, whole: Tensor) -> Tensor:
        first, end = self.place.own
        return whole.view(-1)[first:end]


class DistributedAdamW:
    """One rank's share of AdamW over all weights of a model."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        weights: Sequence[Weight],
        train: TrainConfig,
        config: DistributedDataParallelConfig,
    ) -> None:
        """`weights` are all that the chunks train; `config` says how copies are held together."""
        for weight in weights:
            # megatron-core's mark; its own leaves experts without expert parallelism out.
            weight.parameter.allreduce = not weight.of_experts  # type: ignore[attr-defined]
        self._buffers = Buffers(chunks, config)
        places = dict(self._buffers.places())
        host = train.optimizer_cpu_offload
        self._pieces = [
            _piece(weight, places[weight.parameter], divided=self._buffers.divided, on_host=host)
            for weight in weights
        ]
        self._by_name = {piece.weight.name: piece for piece in self._pieces}
        self._own = [piece for piece in self._pieces if len(piece.master)]
        self._steps: Steps | HostSteps = (HostSteps if host else Steps)(self._own, train)
        self._runs: dict[Stepped, Run] = {p: run for run in self._steps.runs for p in run.pieces}
        self.steps = 0

    def set_steps(self, steps: int) -> None:
        """Say how many steps the moments stand for."""
        self.steps = steps
        for run in self._steps.runs:
            run.set_steps(steps)

    # --- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def collect_gradients(self) -> float:
        """See `Optimizer`."""
        self._buffers.finish()
        _add_up_tied(self._pieces)
        _add_up_over_tensor(self._own)
        for piece in self._own:
            piece.reduced = piece.gradient.float()
        counted = [piece.reduced for piece in self._own if piece.counts]
        device = self._pieces[0].place.gradient.device
        square = torch.zeros((), dtype=torch.float64, device=device)
        if counted:
            square += nn.utils.get_total_norm(counted).double().square()
        dist.all_reduce(square)
        return math.sqrt(square.item())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """See `Optimizer`."""
        if scale != 1.0 and self._own:
            torch._foreach_mul_([piece.reduced for piece in self._own], scale)
        self._steps.step(lr)
        self.steps += 1
        self._buffers.send()
        self.drop_gradients()

    @torch.no_grad()
    def publish(self) -> None:
        """Have the weights that compute become the master weights."""
        self._steps.hand_over()
        self._buffers.settle(again=True)

    def settle(self) -> None:
        """Wait for weights that are on their way; all ranks call it before they are read otherwise
        than by a forward pass.
        """
        self._buffers.settle()

    def drop_gradients(self) -> None:
        """See `Optimizer`."""
        self._buffers.drop_gradients()

    # --- what is held, weight by weight -----------------------------------------------------------

    def holds(self, name: str) -> bool:
        """Whether a weight is this optimizer's."""
        return name in self._by_name

    @torch.no_grad()
    def read(self, kind: Kind, name: str) -> Tensor:
        """A master weight or moment, float32 and like the weight on this rank; all ranks that have
        a copy call it.
        """
        piece = self._by_name[name]
        parameter, held = piece.weight.parameter, self._held(kind, piece)
        whole = torch.empty(parameter.numel(), dtype=torch.float32, device=parameter.device)
        first, end = piece.place.own
        whole[first:end] = held
        if self._buffers.divided:
            sent = [
                parallel.spread_later(whole[first:end], piece.place.ranks, rank)
                for rank, (first, end) in enumerate(piece.place.spans)
                if first < end
            ]
            for work in sent:
                work.wait()
        return whole.view(parameter.shape)

    @torch.no_grad()
    def write(self, kind: Kind, name: str, whole: Tensor) -> None:
        """Replace it; `publish` has weights follow their masters."""
        piece = self._by_name[name]
        first, end = piece.place.own
        self._held(kind, piece).copy_(whole.reshape(-1)[first:end])

    def gradients(self) -> Iterator[Tensor]:
        """Where those of a step add up."""
        return self._buffers.gradients()

    def tensors(self, kind: Kind) -> Iterator[Tensor]:
        """This rank's share of the master weights, or of a moment."""
        return (self._held(kind, piece) for piece in self._pieces)

    def _held(self, kind: Kind, piece: Piece) -> Tensor:
        if kind == "model" or piece not in self._runs:
            return piece.master
        return self._runs[piece].moment(kind, piece)


def _piece(weight: Weight, place: Place, *, divided: bool, on_host: bool) -> Piece:
    tensor = parallel.tensor_ranks(of_experts=weight.of_experts)
    first = (weight.is_share or tensor.rank == 0) and not weight.repeated
    piece = Piece(
        weight=weight,
        place=place,
        counts=first and (divided or place.ranks.rank == 0),
        master=torch.empty(0),
    )
    device = "cpu" if on_host else weight.parameter.device
    piece.master = piece.computes.to(device, torch.float32, copy=True)
    return piece


def _add_up_tied(pieces: Sequence[Piece]) -> None:
    """Gradients of an embedding that is the output layer too, on the two stages that have it."""
    # megatron-core's mark; it has a bucket of its own on both, so they hold the same elements.
    tied = [p for p in pieces if getattr(p.weight.parameter, "shared_embedding", False)]
    if tied and parallel.stages().size > 1:
        dist.all_reduce(tied[0].gradient, group=parallel_state.get_embedding_group())


def _add_up_over_tensor(pieces: Sequence[Piece]) -> None:
    """Gradients of what is whole on tensor-parallel ranks, each of which saw a part of what it acts
    on; they hold the same elements.
    """
    ranks = parallel.tensor_ranks()
    parts = [piece.gradient for piece in pieces if piece.weight.acts_on_share]
    if ranks.size > 1 and parts:
        joined = torch.cat(parts)
        ranks.add(joined)
        torch._foreach_copy_(parts, list(joined.split([len(part) for part in parts])))
