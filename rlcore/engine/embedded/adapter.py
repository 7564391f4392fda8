"""Adapters of low rank (LoRA, in PEFT's format), added to the weights of the starting model.

This engine has one set of weights: it holds one adapter or none, and every request must say so. A
real server adds several as it computes.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlcore.engine.embedded.weights import weight_files
from rlcore.errors import EngineError

Put = Callable[[dict[str, Tensor]], int]
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class Adapters:
    """The adapter that the engine holds.

    Args:
        base: folder of the starting model.
    """

    def __init__(self, base: Path) -> None:
        self.name: str | None = None
        self._base = base
        self._changed: set[str] = set()

    def check(self, asked: Any) -> None:
        """A request is for what the engine computes with now."""
        for name in asked if isinstance(asked, list) else [asked]:
            if name != self.name:
                raise EngineError(
                    f"lora_path {name!r} is not what this engine computes with: it holds the "
                    f"adapter {self.name!r} alone."
                )

    def load(self, body: dict[str, Any], put: Put) -> int:
        """Put the weights that the adapter of a request changes; returns their number."""
        name, folder = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(folder, str):
            raise EngineError("lora_name and lora_path must be strings.")
        if self.name is not None:
            raise EngineError(f"The adapter '{self.name}' is loaded; unload it first.")
        weights = _merged(self._base, Path(folder))
        count = put(weights)
        self.name, self._changed = name, set(weights)
        return count

    def unload(self, body: dict[str, Any], put: Put) -> int:
        """Put the weights that it changed as they were; returns their number."""
        if self.name is None or body.get("lora_name") != self.name:
            raise EngineError(f"The adapter {body.get('lora_name')!r} is not loaded.")
        count = put(_read(self._base, self._changed))
        self.name, self._changed = None, set()
        return count


def _merged(base: Path, folder: Path) -> dict[str, Tensor]:
    """W + (alpha / r) B A of each layer that the adapter has, in float32."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        parts = load_file(folder / "adapter_model.safetensors")
        scale = config["lora_alpha"] / config["r"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise EngineError(f"{folder} holds no adapter that can be read: {error}.") from None
    heads = [name.removesuffix(A) for name in parts if name.endswith(A)]
    weights = _read(base, (f"{head.removeprefix(PREFIX)}.weight" for head in heads))
    for head in heads:
        name = f"{head.removeprefix(PREFIX)}.weight"
        weights[name] = torch.addmm(
            weights[name].float(), parts[head + B].float(), parts[head + A].float(), alpha=scale
        )
    return weights


def _read(base: Path, names: Iterable[str]) -> dict[str, Tensor]:
    wanted = set(names)
    out: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for file in weight_files(base):
            handle = stack.enter_context(safe_open(str(file), framework="pt"))
            out |= {name: handle.get_tensor(name) for name in wanted & set(handle.keys())}
    if missing := wanted - out.keys():
        raise EngineError(f"The model in {base} has no weights {', '.join(sorted(missing)[:3])}.")
    return out
