"""The trainer's state as files (torch DCP), and its identity by content.

A state is the parameters that are trained, AdamW's moments, the count of optimizer steps (which
fixes the learning rate) and the random generator; of a critic, where there is one, the same; and
the parameters of a reference that follows the policy. Each rank writes the shards that it holds;
any other number of ranks can read them.

Invariants:
- Digests hold names, shapes, types and bytes of whole tensors, and neither ranks nor file layout.
- What is saved from what was loaded has the digests of what was loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore.errors import Corrupt
from rlcore.train.digests import digest_line, digest_of_lines
from rlcore.train.fsdp.critic import TrainedCritic
from rlcore.train.fsdp.model import Policy
from rlcore.train.fsdp.optimizer import ShardedAdamW
from rlcore.train.fsdp.shards import METADATA, ShardReader, ShardWriter, shard_name
from rlcore.train.trainer import StateDigest

STEPS, CRITIC_STEPS, RNG = "optimizer_steps", "critic.optimizer_steps", "rng"
REFERENCE = "reference."
Weights = Mapping[str, Tensor]
"""Parameters by name."""


@torch.no_grad()
def save(
    folder: Path,
    policy: Policy,
    optimizer: ShardedAdamW,
    critic: TrainedCritic | None,
    reference: Weights | None,
    writer: ShardWriter,
) -> None:
    """Write this rank's shards below `folder`; rank 0 adds the metadata. Files are not synced to
    disk.

    Args:
        reference: of a reference that follows the policy.
        writer: kept for as long as models and optimizers are.
    """
    writer.write(folder, _tensors(policy, optimizer, critic, reference))


def holds_reference(folder: Path) -> bool:
    """Whether a state has a reference that follows the policy.

    Raises:
        Corrupt: the folder is no state, or damaged.
    """
    try:
        names = ShardReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        # A pickle that is damaged raises anything.
        raise Corrupt(f"{folder} does not load as a state of this model: {error}") from error
    return any(name.startswith(REFERENCE) for name in names)


def load(
    folder: Path,
    policy: Policy,
    optimizer: ShardedAdamW,
    critic: TrainedCritic | None,
    reference: Weights | None = None,
) -> StateDigest:
    """Read a state in place, whatever number of ranks wrote it.

    Args:
        reference: where the state's reference goes, if it `holds_reference`.

    Raises:
        Corrupt: the folder is no state of this model, or damaged.
    """
    tensors = _tensors(policy, optimizer, critic, reference)
    try:
        with _quiet():
            dcp.load(
                tensors,
                storage_reader=ShardReader(folder),
                no_dist=dist.get_world_size() == 1,
            )
    except (Exception, dcp.CheckpointException) as error:
        # DCP raises whatever its readers meet (pickle, header, key and shape errors), and a class
        # of its own, no Exception, around those of several ranks.
        raise Corrupt(f"{folder} does not load as a state of this model: {error}") from error
    optimizer.take_parameters()
    optimizer.set_steps(int(tensors[STEPS].item()))
    if critic is not None:
        critic.optimizer.take_parameters()
        critic.optimizer.set_steps(int(tensors[CRITIC_STEPS].item()))
    torch.set_rng_state(tensors[RNG])
    return digest(policy, optimizer, critic, reference)


def rank_files(folder: Path, rank: int) -> list[Path]:
    """The files of a saved state that `rank` has written."""
    names = [shard_name(rank), METADATA] if rank == 0 else [shard_name(rank)]
    return [folder / name for name in names]


@torch.no_grad()
def digest(
    policy: Policy,
    optimizer: ShardedAdamW,
    critic: TrainedCritic | None = None,
    reference: Weights | None = None,
) -> StateDigest:
    """Digests of what is held; the same on every rank."""
    model: list[tuple[str, Tensor]] = [(name, p.detach()) for name, p in policy.trained()]
    moments: list[tuple[str, Tensor]] = [("steps", torch.tensor(optimizer.steps))]
    moments += optimizer.moments()
    if critic is not None:
        model += [(f"critic.{name}", p.detach()) for name, p in critic.model.weights()]
        moments += [(f"critic.{name}", m) for name, m in critic.optimizer.moments()]
        moments.append(("critic.steps", torch.tensor(critic.optimizer.steps)))
    model += [(f"{REFERENCE}{name}", p) for name, p in (reference or {}).items()]
    return StateDigest(_digest(model), _digest(moments))


def _tensors(
    policy: Policy,
    optimizer: ShardedAdamW,
    critic: TrainedCritic | None,
    reference: Weights | None,
) -> dict[str, Tensor]:
    """Everything by name; loading writes into these."""
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in policy.trained()}
    tensors.update(optimizer.moments())
    tensors[STEPS] = torch.tensor(optimizer.steps)
    tensors[RNG] = torch.get_rng_state()
    if critic is not None:
        tensors.update({f"critic.model.{n}": p.detach() for n, p in critic.model.weights()})
        tensors.update({f"critic.{name}": m for name, m in critic.optimizer.moments()})
        tensors[CRITIC_STEPS] = torch.tensor(critic.optimizer.steps)
    tensors.update({f"{REFERENCE}{name}": p for name, p in (reference or {}).items()})
    return tensors


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the sorted lines `name dtype shape sha256(bytes)`.

    A tensor is whole on all ranks for a moment; they share the hashing.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    lines: list[str] = []
    for i, (name, tensor) in enumerate(tensors):
        whole = full(tensor)
        if i % world == rank:
            lines.append(digest_line(name, whole))
    if world > 1:
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, lines)
        lines = [line for part in cast(list[list[str]], gathered) for line in part]
    return digest_of_lines(lines)


def held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor: gathered on all ranks where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    # What one rank holds is whole already; asking DTensor for it costs ten times as much.
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


class _quiet(warnings.catch_warnings):
    """Without DCP's warnings about working without collectives, which is what was asked for."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
