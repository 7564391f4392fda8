"""Hugging Face folders: safetensors under the model's own names, config, tokenizer.

Invariants:
- A folder appears whole under its name, or not at all.
- Tensors stream: at most one file's worth (`SHARD_BYTES`) is held at a time.
- The config is the source folder's, but for the type of the weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.train.trainer import DType

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in one file, unless a single tensor is larger."""
NamedTensors = Iterable[tuple[str, "Tensor"]]
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


@dataclass(frozen=True)
class Adapter:
    """Updates of a model in PEFT's format."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def write_hf_folder(
    folder: Path, source: Path, tensors: NamedTensors, dtype: DType, adapter: Adapter | None = None
) -> None:
    """Write a model.

    Args:
        folder: must not exist; its parent is made.
        source: the folder that the model was loaded from: its small files are copied.
        tensors: all weights by name, of `dtype`.
        adapter: what is already in these weights, for a folder `adapter` of its own: beside them,
            loaders would add it once more.
    """
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    copy_small_files(source, staging, dtype)
    write_tensors(staging, tensors)
    if adapter is not None:
        write_adapter(staging / "adapter", adapter)
    os.rename(staging, folder)


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter into a folder that is made for it."""
    from safetensors.torch import save_file

    folder.mkdir()
    text = json.dumps(adapter.config, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, "utf-8")
    save_file(adapter.tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def copy_small_files(source: Path, target: Path, dtype: str) -> None:
    """Everything of a model folder but its weights; the config says `dtype`."""
    for path in sorted(p for p in source.iterdir() if p.is_file()):
        if not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    write_config(source, target, dtype)


def write_config(source: Path, target: Path, dtype: str) -> None:
    """The source's config.json, for weights of `dtype`."""
    (target / "config.json").write_text(config_text(source, dtype), "utf-8")


def config_text(source: Path, dtype: str) -> str:
    """A folder's config.json, for weights of `dtype`."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = dtype
    return json.dumps(config, indent=2) + "\n"


def write_tensors(folder: Path, tensors: NamedTensors, shard_bytes: int = SHARD_BYTES) -> None:
    """Safetensors below `folder`: one file, or several with an index."""
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    total = 0
    for held in buckets(tensors, shard_bytes):
        save_file(held, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(held))
        total += sum(t.numel() * t.element_size() for t in held.values())
    # A file's name says of how many it is one, which is known only now.
    files = shard_names(len(parts))
    for k, file in enumerate(files):
        (folder / f"part-{k}").rename(folder / file)
    if len(parts) > 1:
        where = {name: file for names, file in zip(parts, files, strict=True) for name in names}
        write_index(folder, where, total)


def shard_names(count: int) -> list[str]:
    """Names of a Hugging Face folder's safetensors files, where it has `count` of them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]


def write_index(folder: Path, where: dict[str, str], total: int) -> None:
    """The index of several files: the file of each tensor, and the bytes of all."""
    index = {"metadata": {"total_size": total}, "weight_map": where}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, "utf-8")


def buckets(tensors: NamedTensors, limit: int) -> Iterator[dict[str, Tensor]]:
    """Runs of at most `limit` bytes, or of one larger tensor; never an empty one."""
    return (bucket for bucket, _ in buckets_and_last(tensors, limit))


def buckets_and_last(tensors: NamedTensors, limit: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """The same, and of each whether it is the last: known without gathering another one."""
    held: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and used + size > limit:
            yield held, False
            held, used = {}, 0
        held[name] = tensor.contiguous()
        used += size
    if held:
        yield held, True
