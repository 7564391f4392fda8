"""A Hugging Face folder in fp8 blocks, of one that is not: what engines start from.

Projections of decoder layers are quantised, experts' among them, as in published folders;
embedding, output layer, norms and routers are not.

Invariants: those of `rlcore.conversion.convert`; numbers that are not quantised become bfloat16,
but for biases of routers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.conversion.convert import Conversion, done, entry_of
from rlcore.conversion.folder import whole_folder
from rlcore.conversion.safetensors import NARROW, TORCH_NAMES, Entry, write_shards
from rlcore.conversion.sources import HfFolder, Weights
from rlcore.models.hf_config import read_hf_config
from rlcore.models.tensors import TensorSpec, tensors
from rlcore.weights.export import copy_small_files
from rlcore.weights.fp8 import SCALE, quantise

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = (128, 128)
"""The only one that engines have kernels for everywhere."""


def hf_to_fp8(source: Path, target: Path) -> Conversion:
    """Quantise a folder.

    Raises:
        ConfigError: `target` exists, or the model is not known.
        DataError: a tensor is missing, of another shape or type, or has no place.
    """
    import torch

    begun = time.monotonic()
    arch = read_hf_config(source)
    weights = Weights(arch, HfFolder(source))
    specs = list(tensors(arch))
    plain = [entry_of(spec, weights.dtype(spec.name), "bfloat16") for spec in specs]
    entries = [part for spec, one in zip(specs, plain, strict=True) for part in _written(spec, one)]

    def each() -> Iterator[tuple[str, Tensor]]:
        for spec, one in zip(specs, plain, strict=True):
            tensor = weights.read(spec.name)
            if is_quantised(spec):
                narrow, scales = quantise(tensor, BLOCK)
                yield spec.name, narrow
                yield spec.name + SCALE, scales
            else:
                yield spec.name, tensor.to(getattr(torch, TORCH_NAMES[one.dtype]))

    kept = [spec.name.removesuffix(".weight") for spec in specs if _is_other_matrix(spec)]
    with whole_folder(target) as staging:
        copy_small_files(source, staging, "bfloat16")
        _say_how(staging / "config.json", ["lm_head", *kept])
        digests = write_shards(staging, entries, each())
        count, left_out = len(entries), weights.left_out
        return done(source, target, staging, "fp8", count, begun, left_out, digests)


def is_quantised(spec: TensorSpec) -> bool:
    """Whether a tensor becomes 8 bits."""
    module = spec.name.removesuffix(".weight").rpartition(".")[2]
    return ".layers." in spec.name and len(spec.shape) == 2 and "proj" in module


def _is_other_matrix(spec: TensorSpec) -> bool:
    return ".layers." in spec.name and len(spec.shape) == 2 and not is_quantised(spec)


def _written(spec: TensorSpec, plain: Entry) -> list[Entry]:
    if not is_quantised(spec):
        return [plain]
    blocks = tuple(-(-size // step) for size, step in zip(spec.shape, BLOCK, strict=True))
    return [Entry(spec.name, spec.shape, NARROW), Entry(spec.name + SCALE, blocks, "F32")]


def _say_how(path: Path, kept: list[str]) -> None:
    config = json.loads(path.read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": kept,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
