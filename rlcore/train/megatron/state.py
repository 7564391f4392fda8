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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rlcore.conversion.sources import HfFolder, Weights
from rlcore.conversion.trainer_state import BUFFERS, TrainerState, WithBuffers
from rlcore.errors import Corrupt
from rlcore.train.digests import digest_line, digest_of_lines
from rlcore.train.fsdp.shards import ShardReader, ShardWriter
from rlcore.train.megatron import parallel
from rlcore.train.megatron.held import Held
from rlcore.train.megatron.optimizer import KINDS, MOMENTS, DistributedAdamW, Kind
from rlcore.train.megatron.weights import own_share, united
from rlcore.train.trainer import StateDigest

STEPS, RNG = "optimizer_steps", "rng"


@dataclass(frozen=True)
class Part:
    """A model with its optimizer, and what its names in a state begin with."""

    held: Sequence[Held]
    optimizer: DistributedAdamW
    prefix: str = ""
    """`critic.`, or nothing."""
    biases: bool = False
    """Whether it has biases of routers, which training has moved."""


def save(folder: Path, parts: Sequence[Part], writer: ShardWriter) -> None:
    """Write this rank's share below `folder`; rank 0 adds the metadata."""
    tensors: dict[str, Tensor] = {RNG: torch.get_rng_state()}
    for part in parts:
        tensors[f"{part.prefix}{STEPS}"] = torch.tensor(part.optimizer.steps)
        for kind in KINDS:
            for name, whole in _own_tensors(part, kind):
                tensors[f"{part.prefix}{kind}.{name}"] = whole.to("cpu", copy=True)
    writer.write(folder, tensors)


def load(folder: Path, parts: Sequence[Part], model_folder: Path) -> StateDigest:
    """Read a state in place, whatever layout wrote it.

    Raises:
        Corrupt: the folder is no state of this model, or damaged.
    """
    try:
        parts = [replace(part, biases=holds_biases(folder, part.prefix)) for part in parts]
        for part in parts:
            _load(folder, part, model_folder)
        rng = {RNG: torch.get_rng_state()}
        _read(folder, rng)
        torch.set_rng_state(rng[RNG])
    except Exception as error:
        # A damaged state raises whatever its readers meet.
        raise Corrupt(f"{folder} does not load as a state of this model: {error}") from error
    return digest(parts)


def holds_biases(folder: Path, prefix: str = "") -> bool:
    """Whether a state has biases of routers; else they are those that training began with."""
    return any(name.endswith(BUFFERS) for name in TrainerState(folder, f"{prefix}model.").shapes)


@torch.no_grad()
def _load(folder: Path, part: Part, model_folder: Path) -> None:
    for kind in KINDS:
        stored = TrainerState(folder, f"{part.prefix}{kind}.")
        weights = Weights(part.held[0].arch, WithBuffers(stored, HfFolder(model_folder)))
        for held in part.held:
            if part.optimizer.holds(held.name):
                whole = own_share(held.rule, weights.read, held.tensor)
                part.optimizer.write(kind, held.name, whole)
            elif held.parameter is None and kind == "model":
                held.tensor.copy_(own_share(held.rule, weights.read, held.tensor))
    steps = {f"{part.prefix}{STEPS}": torch.tensor(0)}
    _read(folder, steps)
    part.optimizer.set_steps(int(steps[f"{part.prefix}{STEPS}"]))
    part.optimizer.publish()


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        # That ranks do not confer is what was asked for.
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=ShardReader(folder), no_dist=True)


def digest(parts: Sequence[Part]) -> StateDigest:
    """Digests of what is held; the same on every rank."""
    model: list[str] = []
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


@torch.no_grad()
def _own_tensors(part: Part, kind: Kind) -> Iterator[tuple[str, Tensor]]:
    """Those whole tensors that this rank is to keep; all ranks go through all that they hold."""
    for number, held in enumerate(part.held):
        if held.repeated:
            continue
        if part.optimizer.holds(held.name):
            whole = list(united(held.rule, part.optimizer.read(kind, held.name)))
        elif held.parameter is None and kind == "model" and part.biases:
            whole = list(united(held.rule, held.tensor))
        else:
            continue
        copies = parallel.reducing_ranks(of_experts=held.of_experts)
        divided = parallel.tensor_ranks(of_experts=held.of_experts)
        if number % (copies.size * divided.size) == copies.rank * divided.size + divided.rank:
            yield from whole
