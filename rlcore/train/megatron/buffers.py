"""Weights and gradients of a model in contiguous memory, which ranks that have copies of them add
up and gather while they compute: megatron-core's `DistributedDataParallel`, over each run of
layers.

Its hooks add gradients up in a buffer as they come. With the last micro-batch of a step it sends
each bucket off as soon as it and those before it are full (`overlap_grad_reduce`); and a module of
the next forward pass waits only for the bucket that has its weights (`overlap_param_gather`).

Invariants:
- Ranks that have copies of a weight have it at the same place of the same bucket.
- All ranks send buckets in one order, whichever is full first on each: that may differ where torch
  has compiled layers for other micro-batches, or an expert gets no token.
- Whoever reads weights otherwise than by a forward pass calls `settle` first, on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from rlcore.train.megatron import parallel
from rlcore.train.megatron.compilation import compiled_parts
from rlcore.train.megatron.cpu import without_cuda
from rlcore.train.ranks import Ranks

Span = tuple[int, int]
"""A run of the elements of a weight: first, and behind the last."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a weight lies, on all ranks that have a copy."""

    ranks: Ranks
    spans: tuple[Span, ...]
    """Of each rank, what it updates: a part, or all of it."""
    gradient: Tensor
    """Like the weight; within a rank's span it is whole after `Buffers.finish`."""

    @property
    def own(self) -> Span:
        """This rank's."""
        return self.spans[self.ranks.rank]


class Buffers:
    """Of all runs of layers of a model on this rank."""

    def __init__(self, chunks: Sequence[GPTModel], config: DistributedDataParallelConfig) -> None:
        """Weights of experts are marked by `allreduce = False`, as megatron-core does."""
        if all(parallel.reducing_ranks(of_experts=e).size == 1 for e in (False, True)):
            # There is nothing to send, and nothing to wait for.
            off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
            config = replace(config, use_distributed_optimizer=False, **off)
        self.divided = config.use_distributed_optimizer
        self._gathers_later = config.overlap_param_gather
        self._finished = False
        with without_cuda():
            self._wrapped = [_wrapped(chunk, config, k > 0) for k, chunk in enumerate(chunks)]
        overlaps = config.overlap_grad_reduce
        self._sending = _InOrder([*_from_behind(self._wrapped)] if overlaps else [])
        functions = [ddp.no_sync for ddp in self._wrapped]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
        if config.overlap_param_gather and chunks[-1].post_process:
            _gather_what_is_behind(chunks[-1], self._wrapped[-1])

    @property
    def _groups(self) -> Iterator[Any]:
        for ddp in self._wrapped:
            yield from ddp.bucket_groups
            yield from ddp.expert_parallel_bucket_groups

    def places(self) -> Iterator[tuple[nn.Parameter, Place]]:
        """Of all weights that are trained."""
        for ddp in self._wrapped:
            for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
                ranks = Ranks(buffer.data_parallel_group)
                for parameter, (start, end, number) in buffer.param_index_map.items():
                    spans: tuple[Span, ...] = ((0, end - start),) * ranks.size
                    if self.divided:
                        spans = _spans(start, end, buffer.bucket_indices[number], ranks.size)
                    yield parameter, Place(ranks, spans, parameter.main_grad)

    def gradients(self) -> Iterator[Tensor]:
        """Where those of a step add up."""
        for ddp in self._wrapped:
            for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
                yield buffer.grad_data

    def finish(self) -> None:
        """Have gradients added up over the ranks, as far as they are not yet."""
        with without_cuda():
            # The first step finds out which gradients a bucket must wait for.
            self._sending.rest()
            for group in self._groups:
                group.finish_grad_sync()
        self._finished = True

    def send(self) -> None:
        """The spans of all ranks have new weights: gather them, or leave that to the next forward
        pass.
        """
        if self.divided and not self._gathers_later:
            self.settle(again=True)

    def settle(self, *, again: bool = False) -> None:
        """Weights are gathered when this returns; `again`, even if they had been."""
        if not self.divided:
            return
        for group in self._groups:
            if group.param_gather_handle is not None:
                # It waits for what is on its way.
                group.start_param_sync(force_sync=True)
            if again or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)

    def drop_gradients(self) -> None:
        """Forget them; those on their way arrive first."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
            counts = group.per_param_grad_ready_counts
            if not self._finished or len(counts) < len(group.params):
                # A pass that broke off, or was none of a step, says nothing of how many there are.
                group.per_param_grad_ready_counts = {}
        self._finished = False
        self._sending.begin()
        for ddp in self._wrapped:
            ddp.zero_grad_buffer()


class _InOrder:
    """Groups of buckets, and which of them have sent their gradients in this step."""

    def __init__(self, groups: Sequence[Any]) -> None:
        """`groups`: as they are to send."""
        self._send = {group: group.start_grad_sync for group in groups}
        for group in groups:
            group.start_grad_sync = partial(self._full, group)
        self.begin()

    def begin(self) -> None:
        """None is full."""
        self._waiting = deque(self._send)
        self._filled = set[Any]()

    def rest(self) -> None:
        """Send all that are left."""
        for group in [*self._waiting]:
            self._full(group)

    def _full(self, group: Any, force_all_reduce: bool = False) -> None:
        """In the place of megatron-core's `start_grad_sync`."""
        self._filled.add(group)
        while self._waiting and self._waiting[0] in self._filled:
            self._send[self._waiting.popleft()](force_all_reduce=force_all_reduce)


def _from_behind(wrapped: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    """Groups of buckets in the order in which a backward pass fills them."""
    for ddp in reversed(wrapped):
        at = {parameter: k for k, parameter in enumerate(ddp.module.parameters())}
        groups = (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        yield from sorted(groups, key=lambda group: -min(at[p] for p in group.params))


def _wrapped(
    chunk: GPTModel, config: DistributedDataParallelConfig, follows: bool
) -> DistributedDataParallel:
    """`follows`: other runs of layers of this stage come before; it needs no buckets."""
    config, more = replace(config), {}
    if config.use_distributed_optimizer and hasattr(
        DistributedOptimizer, "compute_full_param_layout"
    ):
        more["full_param_layout"] = _layout_of_buckets(chunk, config, follows)
    ddp = DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=follows, **more)
    for layer, modules in compiled_parts(chunk) if config.overlap_param_gather else ():
        _wait_before(ddp, layer, modules)
    return ddp


def _wait_before(
    ddp: DistributedDataParallel, layer: nn.Module, modules: Sequence[nn.Module]
) -> None:
    """A layer waits for the weights of all these modules before it begins, and none of them for its
    own: that would be a part of the code that is compiled.
    """
    wait = ddp._make_forward_pre_hook()
    for module in modules:
        ddp.remove_forward_pre_hook_handles[module].remove()
    layer.register_forward_pre_hook(lambda *_: [wait(module) for module in modules] and None)


def _layout_of_buckets(
    chunk: GPTModel, config: DistributedDataParallelConfig, follows: bool
) -> Any:
    """From 0.19 on, the caller says where weights lie whose optimizer is divided."""
    ranks, of_experts = (parallel.reducing_ranks(of_experts=e).size for e in (False, True))
    size = config.bucket_size or max(40_000_000, 1_000_000 * ranks)
    whole = follows or parallel.stages().rank > 0 or not config.overlap_grad_reduce
    return DistributedOptimizer.compute_full_param_layout(
        [p for p in chunk.parameters() if p.requires_grad],
        None if whole else size,
        ranks,
        config,
        of_experts,
    )


def _spans(start: int, end: int, bucket: Span, parts: int) -> tuple[Span, ...]:
    """What each rank has of a weight: its part of the bucket, as far as the weight goes."""
    each = (bucket[1] - bucket[0]) // parts
    edges = [min(max(bucket[0] + k * each, start), end) - start for k in range(parts + 1)]
    return tuple(pairwise(edges))


def _gather_what_is_behind(last: GPTModel, wrapped: DistributedDataParallel) -> None:
    """Weights behind the decoder may be read without a call of their module: the last norm waits
    for them.
    """
    groups = {
        wrapped.param_to_bucket_group[parameter]: None
        for name, parameter in last.named_parameters()
        if parameter.requires_grad and not name.startswith("decoder.")
    }

    def wait(*_: Any) -> None:
        for group in groups:
            group.finish_param_sync()

    last.decoder.final_layernorm.register_forward_pre_hook(wait)
