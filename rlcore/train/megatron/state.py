"""The trainer's state as files, and its identity by content: whole tensors under Hugging Face's
names, in the files and with the digests of the FSDP2 trainer's states.

A tensor is put together on all ranks that have a part of it; one of them keeps it to write or to
hash. So a state can be read at any layout, and by the other backend where it names weights alike
(all but experts).

Invariants:
- Digests hold names, shapes, types and bytes of whole tensors, and neither ranks nor layout.
- What is saved from what was loaded has the digests of what was loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rlcore.conversion.sources import HfFolder, Tensors, Weights
from rlcore.conversion.trainer_state import TrainerState, WithBuffers
from rlcore.errors import Corrupt
from rlcore.train.digests import digest_line, digest_of_lines
from rlcore.train.fsdp.shards import ShardReader, ShardWriter
from rlcore.train.fsdp.state import REFERENCE
from rlcore.train.megatron import parallel
from rlcore.train.megatron.held import Held
from rlcore.train.megatron.optimizer import KINDS, MOMENTS, DistributedAdamW, Kind
from rlcore.train.megatron.weights import ReadTensor, own_share, united
from rlcore.train.trainer import StateDigest

STEPS, RNG = "optimizer_steps", "rng"


@dataclass(frozen=True)
class Part:
    """A model with its optimizer, and what its names in a state begin with."""

    held: Sequence[Held]
    optimizer: DistributedAdamW
    prefix: str = ""

    def name(self, hf: str) -> str:
        """What a tensor is called in a state, behind the prefix and what is held of it."""
        return hf

    def reader(self, stored: Tensors, model: Tensors) -> ReadTensor:
        """Whole tensors, by the names that rules give them.

        Args:
            stored: what a state holds, without prefix.
            model: the folder that training began with, for what it does not change.
        """
        return Weights(self.held[0].arch, WithBuffers(stored, model)).read


def save(
    folder: Path, parts: Sequence[Part], reference: Sequence[Held], writer: ShardWriter
) -> None:
    """Write this rank's share below `folder`; rank 0 adds the metadata.

    Args:
        folder: where to.
        parts: all that is trained.
        reference: of a reference that follows the policy; else nothing.
        writer: kept for as long as models and optimizers are.
    """
    tensors: dict[str, Tensor] = {RNG: torch.get_rng_state()}
    for part in parts:
        tensors[f"{part.prefix}{STEPS}"] = torch.tensor(part.optimizer.steps)
        for kind in KINDS:
            for name, whole in _own_tensors(part, kind):
                tensors[f"{part.prefix}{kind}.{name}"] = whole.to("cpu", copy=True)
    for name, whole in _kept(reference, _as_stored):
        tensors[f"{REFERENCE}{name}"] = whole.to("cpu", copy=True)
    writer.write(folder, tensors)


def load(
    folder: Path,
    parts: Sequence[Part],
    reference: Callable[[Held, Tensor], None] | None,
    model_folder: Path,
) -> StateDigest:
    """Read a state in place, whatever layout wrote it.

    Args:
        folder: of the state.
        parts: all that is trained, the policy first.
        reference: takes what is the policy's tensor in the state's reference, if it holds one.
        model_folder: of the starting model.

    Raises:
        Corrupt: the folder is no state of this model, or damaged.
    """
    try:
        model = HfFolder(model_folder)
        for part in parts:
            _load(folder, part, model)
        lines = []
        if reference is not None:
            lines = _load_reference(folder, parts[0], reference, model)
        rng = {RNG: torch.get_rng_state()}
        _read(folder, rng)
        torch.set_rng_state(rng[RNG])
    except Exception as error:
        # A damaged state raises whatever its readers meet.
        raise Corrupt(f"{folder} does not load as a state of this model: {error}") from error
    return _digest(parts, lines)


@torch.no_grad()
def _load(folder: Path, part: Part, model: Tensors) -> None:
    for kind in KINDS:
        read = part.reader(TrainerState(folder, f"{part.prefix}{kind}."), model)
        for held in part.held:
            if part.optimizer.holds(held.name):
                whole = own_share(held.rule, read, held.tensor)
                part.optimizer.write(kind, held.name, whole)
    steps = {f"{part.prefix}{STEPS}": torch.tensor(0)}
    _read(folder, steps)
    part.optimizer.set_steps(int(steps[f"{part.prefix}{STEPS}"]))
    part.optimizer.publish()


@torch.no_grad()
def _load_reference(
    folder: Path, policy: Part, take: Callable[[Held, Tensor], None], model: Tensors
) -> list[str]:
    """The lines that a digest has of a state's reference: of what is stored, which may be more
    exact than what computes.
    """
    read = policy.reader(TrainerState(folder, REFERENCE), model)

    def share(held: Held) -> Tensor:
        own = own_share(held.rule, read, held.tensor).to(held.tensor.device)
        take(held, own)
        return own

    for held in policy.held:
        if held.repeated:
            share(held)
    found = _kept(policy.held, share)
    return [digest_line(f"{REFERENCE}{name}", whole) for name, whole in found]


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        # That ranks do not confer is what was asked for.
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=ShardReader(folder), no_dist=True)


def digest(parts: Sequence[Part], reference: Sequence[Held]) -> StateDigest:
    """Digests of what is held; the same on every rank."""
    found = _kept(reference, _as_stored)
    return _digest(parts, [digest_line(f"{REFERENCE}{name}", whole) for name, whole in found])


def _digest(parts: Sequence[Part], more: Iterable[str]) -> StateDigest:
    """With further lines of models."""
    model: list[str] = list(more)
    moments: list[str] = []
    for part in parts:
        model += _lines(part, "model", part.prefix)
        for kind in MOMENTS:
            moments += _lines(part, kind, f"{part.prefix}{kind}.")
        if dist.get_rank() == 0:
            moments.append(digest_line(f"{part.prefix}steps", torch.tensor(part.optimizer.steps)))
    return StateDigest(_over_ranks(model), _over_ranks(moments))


def _lines(part: Part, kind: Kind, prefix: str) -> list[str]:
    return [digest_line(f"{prefix}{name}", whole) for name, whole in _own_tensors(part, kind)]


def _over_ranks(lines: Iterable[str]) -> str:
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, list(lines))
    return digest_of_lines(line for part in gathered for line in part)


def _own_tensors(part: Part, kind: Kind) -> Iterator[tuple[str, Tensor]]:
    """`_kept` of a master or moment, by the names in a state."""
    for name, whole in _kept(part.held, lambda held: part.optimizer.read(kind, held.name)):
        yield part.name(name), whole


@torch.no_grad()
def _kept(tensors: Sequence[Held], share: Callable[[Held], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Those whole tensors that this rank is to keep, of the shares that ranks have; all ranks go
    through all trained ones that they hold.
    """
    for number, held in enumerate(tensors):
        if held.parameter is None or held.repeated:
            continue
        whole = list(united(held.rule, share(held)))
        copies = parallel.reducing_ranks(of_experts=held.of_experts)
        divided = parallel.tensor_ranks(of_experts=held.of_experts)
        if number % (copies.size * divided.size) == copies.rank * divided.size + divided.rank:
            yield from whole


def _as_stored(held: Held) -> Tensor:
    """What a reference's tensor is in a state: float32 as all else."""
    return held.tensor.float()
