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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rlcore.conversion.sources import HfFolder, Tensors, Weights
from rlcore.conversion.trainer_state import BUFFERS, TrainerState, WithBuffers
from rlcore.errors import Corrupt
from rlcore.train.digests import Growing, digest_line, digest_of_lines
from rlcore.train.fsdp.shards import ShardReader
from rlcore.train.fsdp.state import REFERENCE
from rlcore.train.megatron import parallel
from rlcore.train.megatron.chunks import Chunk, ChunkWriter, beside
from rlcore.train.megatron.held import Held
from rlcore.train.megatron.optimizer import KINDS, MOMENTS, DistributedAdamW, Kind
from rlcore.train.megatron.weights import ReadTensor, own_share, united
from rlcore.train.trainer import StateDigest
from rlcore.weights.experts import place_in_stack

STEPS, RNG = "optimizer_steps", "rng"


@dataclass(frozen=True)
class Part:
    """A model with its optimizer, and what its names in a state begin with."""

    held: Sequence[Held]
    optimizer: DistributedAdamW
    prefix: str = ""
    biases: bool = False
    """Whether it has biases of routers, which training has moved."""

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


@dataclass(frozen=True)
class _Kept:
    """Tensors that a state holds under one prefix."""

    prefix: str
    held: Sequence[Held]
    share: Callable[[Held], Tensor]
    """What this rank has of one."""
    name: Callable[[str], str] = str

    def united(self, held: Held) -> list[tuple[str, Tensor]]:
        """Hugging Face's tensors, whole; all ranks that have a part call it."""
        return list(united(held.rule, self.share(held)))


def _kept(part: Part, kind: Kind) -> _Kept:
    """Masters, with biases of routers that were moved, or moments."""
    held = _stored(part.held, biases=kind == "model" and part.biases)

    def share(one: Held) -> Tensor:
        trained = one.parameter is not None
        return part.optimizer.read(kind, one.name) if trained else one.tensor

    return _Kept(f"{part.prefix}{kind}.", held, share, part.name)


def _reference(policy: Part, held: Iterable[Held], share: Callable[[Held], Tensor]) -> _Kept:
    """Of a model that was the policy: biases of routers are there if the policy's are."""
    return _Kept(REFERENCE, _stored(held, biases=policy.biases), share)


def _stored(held: Iterable[Held], *, biases: bool) -> list[Held]:
    return [one for one in held if not one.repeated and (biases or one.parameter is not None)]


def _as_stored(held: Held) -> Tensor:
    """What a reference's tensor is in a state: float32 as all else."""
    return held.tensor.float()


def save(
    folder: Path, parts: Sequence[Part], reference: Sequence[Held], writer: ChunkWriter
) -> None:
    """Write this rank's share below `folder`; rank 0 adds the metadata.

    Args:
        folder: where to.
        parts: all that is trained, the policy first.
        reference: of a reference that follows the policy; else nothing.
        writer: kept for as long as models and optimizers are.
    """
    small = dict(_small(parts)) if dist.get_rank() == 0 else {}
    chunks = [Chunk.whole(name, tensor) for name, tensor in small.items()]
    every = [_kept(part, kind) for part in parts for kind in KINDS]
    every.append(_reference(parts[0], reference, _as_stored))
    for kept in every:
        for number, held in enumerate(kept.held):
            if _is_own(number, held):
                chunks += _chunks(held, kept.prefix, kept.name)

    def tensors() -> Iterator[Tensor]:
        yield from small.values()
        for kept in every:
            for number, held in enumerate(kept.held):
                whole = kept.united(held)
                yield from _placed(held, whole) if _is_own(number, held) else ()

    with torch.no_grad():
        writer.write(folder, chunks, tensors())


def _small(parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """What each rank knows."""
    yield RNG, torch.get_rng_state()
    for part in parts:
        yield f"{part.prefix}{STEPS}", torch.tensor(part.optimizer.steps)


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
        parts = [replace(part, biases=holds_biases(folder, part.prefix)) for part in parts]
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


def holds_biases(folder: Path, prefix: str = "") -> bool:
    """Whether a state has biases of routers; else they are those that training began with."""
    return any(name.endswith(BUFFERS) for name in TrainerState(folder, f"{prefix}model.").shapes)


@torch.no_grad()
def _load(folder: Path, part: Part, model: Tensors) -> None:
    for kind in KINDS:
        read = part.reader(TrainerState(folder, f"{part.prefix}{kind}."), model)
        for held in part.held:
            if part.optimizer.holds(held.name):
                whole = own_share(held.rule, read, held.tensor)
                part.optimizer.write(kind, held.name, whole)
            elif kind == "model" and held.parameter is None:
                held.tensor.copy_(own_share(held.rule, read, held.tensor))
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
        if held.repeated or (held.parameter is None and not policy.biases):
            # Taken too, and no part of the digest.
            share(held)
    return _lines(_reference(policy, policy.held, share), REFERENCE)


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        # That ranks do not confer is what was asked for.
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=ShardReader(folder), no_dist=True)


def digest(parts: Sequence[Part], reference: Sequence[Held]) -> StateDigest:
    """Digests of what is held; the same on every rank."""
    return _digest(parts, _lines(_reference(parts[0], reference, _as_stored), REFERENCE))


def _digest(parts: Sequence[Part], more: Iterable[str]) -> StateDigest:
    """With further lines of models."""
    model: list[str] = list(more)
    moments: list[str] = []
    for part in parts:
        model += _lines(_kept(part, "model"), part.prefix)
        for kind in MOMENTS:
            moments += _lines(_kept(part, kind), f"{part.prefix}{kind}.")
        if dist.get_rank() == 0:
            moments.append(digest_line(f"{part.prefix}steps", torch.tensor(part.optimizer.steps)))
    return StateDigest(_over_ranks(model), _over_ranks(moments))


@torch.no_grad()
def _lines(kept: _Kept, prefix: str) -> list[str]:
    """Those of the tensors that this rank hashes, under names with a prefix."""
    lines: list[str] = []
    layers: dict[int, list[Held]] = {}

    def hash_all(found: Sequence[tuple[str, Tensor]]) -> None:
        lines.extend(digest_line(prefix + kept.name(name), whole) for name, whole in found)

    with beside() as do:
        for number, held in enumerate(kept.held):
            if held.of_experts:
                assert held.rule.layer is not None
                layers.setdefault(held.rule.layer, []).append(held)
                continue
            whole = kept.united(held)
            if _is_own(number, held):
                do(hash_all, [(name, one.cpu()) for name, one in whole])
        growing = [_of_experts(kept, layer, layers[layer], do) for layer in sorted(layers)]
    for stacks in growing:
        lines += [f"{prefix}{one.line}" for one in stacks]
    return lines


def _of_experts(
    kept: _Kept, layer: int, own: Sequence[Held], do: Callable[..., None]
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
                found = [one for _, one in kept.united(here[expert][k])]
            if not _is_own(layer, template) or ranks.rank not in (source, target):
                continue
            for j, chunk in enumerate(_chunks(template, "", kept.name)):
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


def _is_own(number: int, held: Held) -> bool:
    """Whether this rank, of those that have the tensor or a part of it, is the one to keep it."""
    copies = parallel.reducing_ranks(of_experts=held.of_experts)
    divided = parallel.tensor_ranks(of_experts=held.of_experts)
    own = copies.rank * divided.size + divided.rank
    return number % (copies.size * divided.size) == own


def _chunks(held: Held, prefix: str, named: Callable[[str], str]) -> list[Chunk]:
    """What its tensors are in a state, in their order."""
    chunks = []
    for spec in held.rule.hf:
        place = place_in_stack(spec.name)
        if place is None:
            name = prefix + named(spec.name)
            chunk = Chunk(name, spec.shape, (0,) * len(spec.shape), spec.shape)
        else:
            stack, expert, number, parts = place
            rows, columns = spec.shape
            chunk = Chunk(
                prefix + named(stack),
                (held.arch.num_experts, parts * rows, columns),
                (expert, number * rows, 0),
                (1, rows, columns),
            )
        chunks.append(chunk)
    return chunks


def _placed(held: Held, whole: Sequence[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """The same tensors, of the shapes of their chunks."""
    for chunk, (_, tensor) in zip(_chunks(held, "", str), whole, strict=True):
        yield tensor.reshape(chunk.shape)
