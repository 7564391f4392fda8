"""The trainer's state as files, and its identity by content: under the names, in the files and with
the digests of the FSDP2 trainer's states, so that either backend reads the other's, at any layout.

A tensor is put together on all ranks that have a part of it; one of them writes or hashes it, each
another one, and keeps none. Experts are written where they are, into one tensor a layer; they are
hashed by one of the ranks that have them, which is sent the others'.

Invariants:
- Digests hold names, shapes, types and bytes of whole tensors, and neither ranks nor layout.
- What is saved from what was loaded has the digests of what was loaded.
- Ranks come to the same tensors in the same order.
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

from rlcore.conversion.sources import HfFolder, Weights
from rlcore.conversion.trainer_state import TrainerState, WithBuffers
from rlcore.errors import Corrupt
from rlcore.train.digests import Growing, digest_line, digest_of_lines
from rlcore.train.fsdp.shards import ShardReader
from rlcore.train.megatron import parallel
from rlcore.train.megatron.chunks import Chunk, ChunkWriter, beside
from rlcore.train.megatron.held import Held
from rlcore.train.megatron.optimizer import KINDS, MOMENTS, DistributedAdamW, Kind
from rlcore.train.megatron.weights import own_share, united
from rlcore.train.trainer import StateDigest
from rlcore.weights.experts import place_in_stack

STEPS, RNG = "optimizer_steps", "rng"


@dataclass(frozen=True)
class Part:
    """A model with its optimizer, and what its names in a state begin with."""

    held: Sequence[Held]
    optimizer: DistributedAdamW
    prefix: str = ""
    """`critic.`, or nothing."""


def save(folder: Path, parts: Sequence[Part], writer: ChunkWriter) -> None:
    """Write this rank's share below `folder`; rank 0 adds the metadata.

    Args:
        writer: kept for as long as models and optimizers are.
    """
    small = dict(_small(parts)) if dist.get_rank() == 0 else {}
    chunks = [Chunk.whole(name, tensor) for name, tensor in small.items()]
    for part in parts:
        for kind in KINDS:
            for number, held in enumerate(part.held):
                if _is_stored(part, held) and _is_own(number, held):
                    chunks += _chunks(held, f"{part.prefix}{kind}.")

    def tensors() -> Iterator[Tensor]:
        yield from small.values()
        for part in parts:
            for kind in KINDS:
                for number, held in enumerate(part.held):
                    if _is_stored(part, held):
                        whole = _united(part, kind, held)
                        yield from _placed(held, whole) if _is_own(number, held) else ()

    with torch.no_grad():
        writer.write(folder, chunks, tensors())


def _small(parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """What each rank knows."""
    yield RNG, torch.get_rng_state()
    for part in parts:
        yield f"{part.prefix}{STEPS}", torch.tensor(part.optimizer.steps)


def load(folder: Path, parts: Sequence[Part], model_folder: Path) -> StateDigest:
    """Read a state in place, whatever layout wrote it.

    Raises:
        Corrupt: the folder is no state of this model, or damaged.
    """
    try:
        for part in parts:
            _load(folder, part, model_folder)
        rng = {RNG: torch.get_rng_state()}
        _read(folder, rng)
        torch.set_rng_state(rng[RNG])
    except Exception as error:
        # A damaged state raises whatever its readers meet.
        raise Corrupt(f"{folder} does not load as a state of this model: {error}") from error
    return digest(parts)


@torch.no_grad()
def _load(folder: Path, part: Part, model_folder: Path) -> None:
    for kind in KINDS:
        stored = TrainerState(folder, f"{part.prefix}{kind}.")
        weights = Weights(part.held[0].arch, WithBuffers(stored, HfFolder(model_folder)))
        for held in part.held:
            if part.optimizer.holds(held.name):
                whole = own_share(held.rule, weights.read, held.tensor)
                part.optimizer.write(kind, held.name, whole)
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


@torch.no_grad()
def _lines(part: Part, kind: Kind, prefix: str) -> list[str]:
    """Those of the tensors that this rank hashes."""
    lines: list[str] = []
    layers: dict[int, list[Held]] = {}

    def hash_all(found: Sequence[tuple[str, Tensor]]) -> None:
        lines.extend(digest_line(f"{prefix}{name}", whole) for name, whole in found)

    with beside() as do:
        for number, held in enumerate(part.held):
            if not _is_stored(part, held):
                continue
            if held.of_experts:
                assert held.rule.layer is not None
                layers.setdefault(held.rule.layer, []).append(held)
                continue
            whole = _united(part, kind, held)
            if _is_own(number, held):
                do(hash_all, [(name, one.cpu()) for name, one in whole])
        growing = [_of_experts(part, kind, layer, layers[layer], do) for layer in sorted(layers)]
    for stacks in growing:
        lines += [f"{prefix}{one.line}" for one in stacks]
    return lines


def _of_experts(
    part: Part, kind: Kind, layer: int, own: Sequence[Held], do: Callable[..., None]
) -> list[Growing]:
    """The lines, to be, of a layer's experts, on the rank that hashes them; none on others."""
    ranks = parallel.expert_ranks()
    target = layer % ranks.size
    stacks: dict[str, Growing] = {}
    here: dict[int, list[Held]] = {}
    for held in own:
        assert held.rule.expert is not None
        here.setdefault(held.rule.expert, []).append(held)
    each = len(here)
    # All experts of a layer are alike.
    templates = here[min(here)]
    for expert in range(each * ranks.size):
        source = expert // each
        for k, template in enumerate(templates):
            found: list[Tensor] = []
            if source == ranks.rank:
                held = here[expert][k]
                found = [one for _, one in _united(part, kind, held)]
            if not _is_own(layer, template) or ranks.rank not in (source, target):
                continue
            for j, chunk in enumerate(_chunks(template, "")):
                tensor = parallel.handed_on(
                    found[j].contiguous() if found else None,
                    chunk.shape[1:],
                    ranks,
                    source,
                    target,
                )
                if ranks.rank == target:
                    one = stacks.setdefault(
                        chunk.name, Growing(chunk.name, torch.float32, chunk.size)
                    )
                    do(one.add, tensor.cpu())
    return list(stacks.values())


def _over_ranks(lines: Iterable[str]) -> str:
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, list(lines))
    return digest_of_lines(line for part in gathered for line in part)


# --- one of Megatron's tensors --------------------------------------------------------------------


def _is_stored(part: Part, held: Held) -> bool:
    return part.optimizer.holds(held.name) and not held.repeated


def _is_own(number: int, held: Held) -> bool:
    """Whether this rank, of those that have the tensor or a part of it, is the one to keep it."""
    copies = parallel.reducing_ranks(of_experts=held.of_experts)
    divided = parallel.tensor_ranks(of_experts=held.of_experts)
    own = copies.rank * divided.size + divided.rank
    return number % (copies.size * divided.size) == own


def _united(part: Part, kind: Kind, held: Held) -> list[tuple[str, Tensor]]:
    """Hugging Face's tensors, whole; all ranks that have a part call it."""
    return list(united(held.rule, part.optimizer.read(kind, held.name)))


def _chunks(held: Held, prefix: str) -> list[Chunk]:
    """What its tensors are in a state, in their order."""
    chunks = []
    for spec in held.rule.hf:
        place = place_in_stack(spec.name)
        if place is None:
            chunk = Chunk(prefix + spec.name, spec.shape, (0,) * len(spec.shape), spec.shape)
        else:
            name, expert, number, parts = place
            rows, columns = spec.shape
            chunk = Chunk(
                prefix + name,
                (held.arch.num_experts, parts * rows, columns),
                (expert, number * rows, 0),
                (1, rows, columns),
            )
        chunks.append(chunk)
    return chunks


def _placed(held: Held, whole: Sequence[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """The same tensors, of the shapes of their chunks."""
    for chunk, (_, tensor) in zip(_chunks(held, ""), whole, strict=True):
        yield tensor.reshape(chunk.shape)
