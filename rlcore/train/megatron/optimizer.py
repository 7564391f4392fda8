"""AdamW with float32 master weights and moments divided among the ranks that hold the same weights.

A weight is cut into as many chunks as ranks have a copy of it; each rank updates its own, and they
gather what came of it. Gradients add up in float32 over the micro-batches of a step, and over ranks
when the step is done: those that copies of a weight got on ranks that saw other samples or tokens,
and on tensor-parallel ranks where each sees a part of what a weight acts on.

Invariants:
- Each element of the model counts once in the norm of the gradient, whatever the layout.
- The weights that compute are the master weights, rounded.
- A step is a function of masters, gradients, moments and the step count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from rlcore.config.tree import TrainConfig
from rlcore.train.megatron import parallel
from rlcore.train.ranks import Ranks

Kind = Literal["model", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("model", "exp_avg", "exp_avg_sq")
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
BUCKET = 1 << 26
"""Elements that are reduced or gathered at once, at most one weight more."""


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
    """This rank's chunk of one weight."""

    name: str
    parameter: nn.Parameter
    ranks: Ranks
    """That have a copy."""
    divided: bool
    """Whether each of them updates a chunk; else all of them the whole."""
    counts: bool
    """Whether the norm has its elements from this rank."""
    over_tensor: bool
    """Whether tensor-parallel ranks add up their gradients."""
    gradient: Tensor
    """float32, of the whole weight on this rank."""
    master: Tensor
    """float32 [chunk]"""

    @property
    def parts(self) -> int:
        """Into how many chunks the weight is cut."""
        return self.ranks.size if self.divided else 1

    def chunks(self, whole: Tensor) -> Tensor:
        """[parts, chunk] of a tensor like the weight; zeros behind its end."""
        flat = whole.reshape(-1)
        return nn.functional.pad(flat, (0, -len(flat) % self.parts)).view(self.parts, -1)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's chunk of a tensor like the weight."""
        return self.chunks(whole)[self.ranks.rank if self.divided else 0]

    def whole(self, chunks: Tensor) -> Tensor:
        """Back from [parts, chunk]."""
        return chunks.reshape(-1)[: self.parameter.numel()].view(self.parameter.shape)


class DistributedAdamW:
    """One rank's share of AdamW over all weights of a model."""

    def __init__(self, weights: Sequence[Weight], config: TrainConfig, *, divided: bool) -> None:
        """`weights` are this rank's; no weight decay for vectors (norms, biases)."""
        self._pieces = [_piece(weight, divided=divided) for weight in weights]
        self._by_name = {piece.name: piece for piece in self._pieces}
        for piece in self._pieces:
            piece.parameter.register_post_accumulate_grad_hook(_adder(piece))
        groups = [
            {
                "params": [p.master for p in self._pieces if (p.parameter.ndim > 1) == decays],
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for piece in self._pieces:
            self._adamw.state[piece.master] = {
                name: torch.zeros_like(piece.master) for name in MOMENTS
            }
        self.after_step: Callable[[], None] | None = None
        """What follows each step."""
        self.set_steps(0)

    def set_steps(self, steps: int) -> None:
        """Say how many steps the moments stand for."""
        self.steps = steps
        for piece in self._pieces:
            device = piece.master.device
            self._adamw.state[piece.master]["step"] = torch.tensor(float(steps), device=device)

    # --- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def collect_gradients(self) -> float:
        """See `Optimizer`."""
        _add_up_tied(self._pieces)
        for piece in self._pieces:
            if piece.over_tensor:
                parallel.tensor_ranks().add(piece.gradient)
        for bucket in _buckets(self._pieces):
            _reduce(bucket)
        counted = [p.master.grad for p in self._pieces if p.counts and p.master.grad is not None]
        device = self._pieces[0].master.device
        square = torch.zeros((), dtype=torch.float64, device=device)
        if counted:
            square += nn.utils.get_total_norm(counted).double().square()
        dist.all_reduce(square)
        return math.sqrt(square.item())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """See `Optimizer`."""
        if scale != 1.0:
            torch._foreach_mul_(
                [g for p in self._pieces if (g := p.master.grad) is not None], scale
            )
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.steps += 1
        self.publish()
        self.drop_gradients()
        if self.after_step is not None:
            self.after_step()

    @torch.no_grad()
    def publish(self) -> None:
        """Have the weights that compute become the master weights."""
        for bucket in _buckets(self._pieces):
            dtype = bucket[0].parameter.dtype
            gathered = _gathered(bucket, [p.master.to(dtype) for p in bucket])
            for piece, chunks in zip(bucket, gathered, strict=True):
                piece.parameter.copy_(piece.whole(chunks))

    def drop_gradients(self) -> None:
        """See `Optimizer`."""
        for piece in self._pieces:
            piece.gradient.zero_()
            piece.master.grad = piece.parameter.grad = None

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
        return piece.whole(_gathered([piece], [self._held(kind, piece)])[0])

    @torch.no_grad()
    def write(self, kind: Kind, name: str, whole: Tensor) -> None:
        """Replace it; `publish` has weights follow their masters."""
        piece = self._by_name[name]
        self._held(kind, piece).copy_(piece.own(whole))

    def gradients(self) -> Iterator[Tensor]:
        """Where those of a step add up."""
        return (piece.gradient for piece in self._pieces)

    def collected(self) -> Iterator[Tensor]:
        """What `collect_gradients` came to, this rank's share."""
        return (piece.master.grad for piece in self._pieces if piece.master.grad is not None)

    def tensors(self, kind: Kind) -> Iterator[Tensor]:
        """This rank's share of the master weights, or of a moment."""
        return (self._held(kind, piece) for piece in self._pieces)

    def _held(self, kind: Kind, piece: Piece) -> Tensor:
        held: Tensor = piece.master if kind == "model" else self._adamw.state[piece.master][kind]
        return held


def _piece(weight: Weight, *, divided: bool) -> Piece:
    ranks = parallel.reducing_ranks(of_experts=weight.of_experts)
    tensor = parallel.tensor_ranks(of_experts=weight.of_experts)
    first = (weight.is_share or tensor.rank == 0) and not weight.repeated
    piece = Piece(
        name=weight.name,
        parameter=weight.parameter,
        ranks=ranks,
        divided=divided,
        counts=first and (divided or ranks.rank == 0),
        over_tensor=weight.acts_on_share and tensor.size > 1,
        gradient=torch.zeros_like(weight.parameter, dtype=torch.float32),
        master=torch.empty(0),
    )
    piece.master = piece.own(weight.parameter.detach().float()).clone()
    return piece


def _adder(piece: Piece) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        piece.gradient.add_(parameter.grad)
        parameter.grad = None

    return add


def _add_up_tied(pieces: Sequence[Piece]) -> None:
    """Gradients of an embedding that is the output layer too, on the two stages that have it."""
    # megatron-core's mark.
    tied = [p for p in pieces if getattr(p.parameter, "shared_embedding", False)]
    if tied and parallel.stages().size > 1:
        dist.all_reduce(tied[0].gradient, group=parallel_state.get_embedding_group())


def _buckets(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of weights that the same ranks have copies of, in the same dtype."""
    open_ones: dict[tuple[object, torch.dtype], list[Piece]] = {}
    for piece in pieces:
        key = piece.ranks.group, piece.parameter.dtype
        bucket = open_ones.setdefault(key, [])
        bucket.append(piece)
        if sum(p.parameter.numel() for p in bucket) >= BUCKET:
            yield open_ones.pop(key)
    yield from open_ones.values()


def _reduce(bucket: Sequence[Piece]) -> None:
    """Add up the gradients of a bucket's weights over the ranks; each keeps its chunk."""
    ranks = bucket[0].ranks
    if ranks.size == 1:
        for piece in bucket:
            piece.master.grad = piece.own(piece.gradient)
        return
    joined = torch.cat([piece.chunks(piece.gradient) for piece in bucket], 1)
    if bucket[0].divided:
        own = torch.empty_like(joined[0])
        dist.reduce_scatter_tensor(own, joined.view(-1), group=ranks.group)
    else:
        own = joined[0]
        ranks.add(own)
    for piece, part in zip(bucket, own.split([len(p.master) for p in bucket]), strict=True):
        piece.master.grad = part


def _gathered(bucket: Sequence[Piece], chunks: Sequence[Tensor]) -> list[Tensor]:
    """[parts, chunk] of each weight of a bucket, from this rank's chunks."""
    if bucket[0].parts == 1:
        return [chunk[None] for chunk in chunks]
    own = torch.cat(list(chunks))
    joined = own.new_empty(bucket[0].parts, len(own))
    dist.all_gather_into_tensor(joined.view(-1), own, group=bucket[0].ranks.group)
    return list(joined.split([len(chunk) for chunk in chunks], 1))
