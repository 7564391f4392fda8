"""The groups of ranks that hold one model together, set up for a layout.

megatron-core keeps them for the whole process, so a process has one layout at a time; another one
takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from rlcore.errors import ConfigError
from rlcore.train.megatron.cpu import own_device
from rlcore.train.megatron.model import Layout
from rlcore.train.ranks import Ranks

_now: list[tuple[Layout, Any]] = []
"""The layout that megatron-core was last set up for, here, and torch.distributed's group then."""


def set_up(layout: Layout) -> None:
    """Make the groups of a layout; all ranks call it.

    Raises:
        ConfigError: the ranks cannot be laid out like that.
    """
    world = dist.get_world_size()
    each = layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel
    if world % each:
        raise ConfigError(
            f"{world} trainer ranks cannot be laid out: megatron.tensor_model_parallel_size = "
            f"{layout.tensor_parallel} x pipeline_model_parallel_size = "
            f"{layout.pipeline_parallel} x context_parallel_size = {layout.context_parallel} must "
            "divide their number (cluster.actor_num_nodes x cluster.actor_num_gpus_per_node)"
        )
    tensor = layout.expert_tensor_parallel or layout.tensor_parallel
    if (world // layout.pipeline_parallel) % (layout.expert_parallel * tensor):
        raise ConfigError(
            f"{world} trainer ranks cannot be laid out: megatron.expert_model_parallel_size = "
            f"{layout.expert_parallel} x expert_tensor_parallel_size = {tensor} must divide the "
            f"{world // layout.pipeline_parallel} ranks of a pipeline's stage"
        )
    if parallel_state.model_parallel_is_initialized():
        if _now == [(layout, dist.group.WORLD)]:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.virtual_pipeline,
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=tensor,
        create_gloo_process_groups=False,
    )
    _now[:] = [(layout, dist.group.WORLD)]
    # Nothing is random, and the tracker that says so needs no CUDA.
    initialize_rng_tracker(inference_rng_tracker=True)


def data_ranks() -> Ranks:
    """Those that have samples of their own, and the same part of the model as this one."""
    return Ranks(parallel_state.get_data_parallel_group())


def reducing_ranks(*, of_experts: bool) -> Ranks:
    """Those over which the gradient of a weight of this rank adds up."""
    if of_experts:
        return Ranks(parallel_state.get_expert_data_parallel_group())
    return Ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))


def tensor_ranks(*, of_experts: bool = False) -> Ranks:
    """Those that divide the weights of this stage among them."""
    if of_experts:
        return Ranks(parallel_state.get_expert_tensor_parallel_group())
    return Ranks(parallel_state.get_tensor_model_parallel_group())


def expert_ranks() -> Ranks:
    """Those that have the experts of a layer among them."""
    return Ranks(parallel_state.get_expert_model_parallel_group())


def stages() -> Ranks:
    """Those that have the layers of the model among them."""
    return Ranks(parallel_state.get_pipeline_model_parallel_group())


def spread(tensor: Tensor, ranks: Ranks, source: int) -> None:
    """What one of the ranks has, to all of them, in place."""
    if ranks.size > 1:
        assert ranks.group is not None
        dist.broadcast(tensor, dist.get_global_rank(ranks.group, source), group=ranks.group)


def spread_later(tensor: Tensor, ranks: Ranks, source: int) -> dist.Work:
    """The same, done when what is returned has been waited for."""
    assert ranks.group is not None
    first = dist.get_global_rank(ranks.group, source)
    work: dist.Work = dist.broadcast(tensor, first, group=ranks.group, async_op=True)
    return work


def handed_on(
    tensor: Tensor | None, shape: Sequence[int], ranks: Ranks, source: int, target: int
) -> Tensor:
    """What `source` has of float32 numbers, on `target`; those two call it."""
    if tensor is None:
        tensor = torch.empty(shape, dtype=torch.float32, device=own_device())
    if source != target:
        assert ranks.group is not None
        if ranks.rank == source:
            dist.send(tensor, dist.get_global_rank(ranks.group, target), group=ranks.group)
        else:
            dist.recv(tensor, dist.get_global_rank(ranks.group, source), group=ranks.group)
    return tensor


def spread_object(value: Any, ranks: Ranks, source: int) -> Any:
    """The same of anything."""
    if ranks.size == 1:
        return value
    held = [value]
    assert ranks.group is not None
    dist.broadcast_object_list(held, dist.get_global_rank(ranks.group, source), group=ranks.group)
    return held[0]
