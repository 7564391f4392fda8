"""Conversions between Hugging Face folders, Megatron checkpoints and the states of trainers.

Invariants:
- Every tensor of the source is written, or listed as left out; anything else is an error that names
  it, raised before the first byte is written.
- A tensor is in memory alone, with what is fused with it, whatever the model's size; and the one
  before it, while its digest is computed.
- Numbers keep their type and bits, but where another type is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.conversion.folder import whole_folder, write_digests
from rlcore.conversion.safetensors import (
    NARROW,
    SAFETENSORS_NAMES,
    TORCH_NAMES,
    Entry,
    write_shards,
)
from rlcore.conversion.sources import HfFolder, Tensors, Weights
from rlcore.conversion.torch_dist import TorchDist, TorchDistWriter, checkpoint_folder
from rlcore.conversion.trainer_state import BUFFERS, TrainerState, WithAdapters, WithBuffers
from rlcore.errors import ConfigError, DataError
from rlcore.models.architecture import Architecture
from rlcore.models.hf_config import read_hf_config
from rlcore.models.tensors import TensorSpec, tensors
from rlcore.train.trainer import DType
from rlcore.weights.export import copy_small_files
from rlcore.weights.megatron import rules

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did."""

    source: str
    target: str
    made: str
    """`torch_dist`, `huggingface` or `fp8`."""
    tensors: int
    bytes: int
    """Of the target's files."""
    seconds: float
    left_out: tuple[str, ...]
    """Tensors of the source that are no part of the decoder."""
    sha256: str
    """Of `conversion.json`, which holds the digests of all files."""


def hf_to_torch_dist(
    source: Path, target: Path, padded_vocab_size: int | None = None
) -> Conversion:
    """A Megatron checkpoint of a Hugging Face folder.

    Args:
        source: the folder.
        target: must not exist.
        padded_vocab_size: rows of embedding and output layer; None: as many as the vocabulary.
            Megatron loads either into a model with more.

    Raises:
        ConfigError: `target` exists, Megatron has no such model, or it is padded to fewer rows.
        DataError: a tensor is missing, of another shape, or has no place.
    """
    begun = time.monotonic()
    arch = read_hf_config(source)
    weights = Weights(arch, HfFolder(source))
    return _write_torch_dist(source, target, arch, weights, padded_vocab_size, None, begun)


def state_to_torch_dist(
    state: Path,
    target: Path,
    model: Path,
    dtype: DType | None = None,
    lora_alpha: float | None = None,
    padded_vocab_size: int | None = None,
) -> Conversion:
    """A Megatron checkpoint of a trainer's state; arguments as of `state_to_hf` and
    `hf_to_torch_dist`.
    """
    begun = time.monotonic()
    arch = read_hf_config(model)
    weights = _of_state(state, model, arch, lora_alpha)
    return _write_torch_dist(state, target, arch, weights, padded_vocab_size, dtype, begun)


def _write_torch_dist(
    source: Path,
    target: Path,
    arch: Architecture,
    weights: Weights,
    padded_vocab_size: int | None,
    dtype: DType | None,
    begun: float,
) -> Conversion:
    import torch

    if padded_vocab_size is not None and padded_vocab_size < arch.vocab_size:
        raise ConfigError(
            f"padded vocabulary of {padded_vocab_size} rows: the model has {arch.vocab_size} tokens"
        )

    def read(name: str) -> Tensor:
        tensor = weights.read(name)
        kept = dtype is None or name.endswith(BUFFERS)
        return tensor if kept else tensor.to(getattr(torch, str(dtype)))

    with whole_folder(target) as staging:
        writer = TorchDistWriter(staging, arch)
        count = 0
        for rule in rules(arch):
            whole = rule.join([read(spec.name) for spec in rule.hf])
            if rule.is_padded and padded_vocab_size is not None:
                more = padded_vocab_size - whole.shape[0]
                whole = torch.nn.functional.pad(whole, (0, 0, 0, more))
            writer.add(rule, whole)
            count += len(rule.hf)
        writer.finish()
        made = "torch_dist"
        return done(source, target, staging, made, count, begun, weights.left_out, writer.digests)


def torch_dist_to_hf(
    source: Path, target: Path, model: Path, dtype: DType | None = None
) -> Conversion:
    """A Hugging Face folder of a Megatron checkpoint.

    Args:
        source: the checkpoint, or the folder with its tracker file.
        target: must not exist.
        model: a Hugging Face folder of the same architecture: its config and tokenizer are copied.
        dtype: of the weights; None: as they are stored.

    Raises:
        ConfigError, DataError: as `hf_to_torch_dist`.
    """
    begun = time.monotonic()
    arch = read_hf_config(model)
    folder = checkpoint_folder(source)
    if folder is None:
        raise DataError(f"{source} holds no torch_dist checkpoint")
    stored = TorchDist(folder, arch)
    entries = [
        entry_of(spec, stored.dtype(rule), dtype) for rule in rules(arch) for spec in rule.hf
    ]

    def each() -> Iterator[tuple[str, Tensor]]:
        for rule in rules(arch):
            parts = rule.split(stored.read(rule))
            yield from zip((spec.name for spec in rule.hf), parts, strict=True)

    return _write_hf(source, target, model, entries, each, begun, stored.left_out)


def state_to_hf(
    state: Path,
    target: Path,
    model: Path,
    dtype: DType | None = None,
    lora_alpha: float | None = None,
) -> Conversion:
    """A Hugging Face folder of a trainer's state, of either backend.

    Args:
        state: folder of the state.
        target: must not exist.
        model: the Hugging Face folder that training began with.
        dtype: of the weights; None: float32, as they are stored.
        lora_alpha: of the adapters that the state holds in place of weights; None: it has none.

    Raises:
        ConfigError, DataError: as `hf_to_torch_dist`.
    """
    begun = time.monotonic()
    arch = read_hf_config(model)
    weights = _of_state(state, model, arch, lora_alpha)
    entries = [entry_of(spec, weights.dtype(spec.name), dtype) for spec in tensors(arch)]

    def each() -> Iterator[tuple[str, Tensor]]:
        for entry in entries:
            yield entry.name, weights.read(entry.name)

    return _write_hf(state, target, model, entries, each, begun, weights.left_out)


def _of_state(state: Path, model: Path, arch: Architecture, lora_alpha: float | None) -> Weights:
    held, begun_with = TrainerState(state), HfFolder(model)
    stored: Tensors = (
        WithBuffers(held, begun_with)
        if lora_alpha is None
        else WithAdapters(held, begun_with, lora_alpha)
    )
    return Weights(arch, stored)


def entry_of(spec: TensorSpec, stored: str, asked: DType | None) -> Entry:
    """What a tensor is written as; biases of routers keep their type."""
    if stored not in TORCH_NAMES or stored == NARROW:
        raise DataError(f"{spec.name} has numbers of type {stored}, which are not converted")
    if asked is None or spec.name.endswith(BUFFERS):
        return Entry(spec.name, spec.shape, stored)
    return Entry(spec.name, spec.shape, SAFETENSORS_NAMES[asked])


def _write_hf(
    source: Path,
    target: Path,
    model: Path,
    entries: Sequence[Entry],
    each: Callable[[], Iterator[tuple[str, Tensor]]],
    begun: float,
    left_out: Sequence[str],
) -> Conversion:
    """Stream tensors into a Hugging Face folder."""
    import torch

    types = {entry.name: TORCH_NAMES[entry.dtype] for entry in entries}
    with whole_folder(target) as staging:
        copy_small_files(model, staging, types[entries[0].name])
        typed = ((name, tensor.to(getattr(torch, types[name]))) for name, tensor in each())
        digests = write_shards(staging, entries, typed)
        count = len(entries)
        return done(source, target, staging, "huggingface", count, begun, left_out, digests)


def done(
    source: Path,
    target: Path,
    staging: Path,
    made: str,
    count: int,
    begun: float,
    left_out: Sequence[str],
    digests: Mapping[str, str],
) -> Conversion:
    """Digest what was written and say what was done; arguments as the fields of `Conversion`, and
    the digests that are known.
    """
    size = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    about = {"source": source.name, "made": made, "tensors": count, "left_out": list(left_out)}
    sha256 = write_digests(staging, about, digests)
    spent = time.monotonic() - begun
    return Conversion(str(source), str(target), made, count, size, spent, tuple(left_out), sha256)
