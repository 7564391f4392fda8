"""LoRA (arXiv 2106.09685): linear layers of a frozen model with trained updates of low rank.

A layer computes W x + (alpha / rank) B A x; A [rank, in] begins at random and B [out, rank] at 0,
so the model begins as it is. Engines and Hugging Face folders get W + (alpha / rank) B A, made a
weight at a time while it travels; the adapter by itself is kept in PEFT's format.

Invariants:
- A's first values depend on the seed and the layer's name alone, so all ranks begin with the same.
- Without its adapters the model is the starting model, bit for bit: that is the reference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.algorithms.packing import PackedBatch
from rlcore.errors import ConfigError
from rlcore.images.model import decoder
from rlcore.train.fsdp.model import Policy
from rlcore.train.fsdp.state import full
from rlcore.train.trainer import Lora

A, B = "lora_A", "lora_B"


class LoraLinear(nn.Linear):
    """A linear layer with its update, in place of one whose weights it takes over."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, seed: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale
        self.active = True
        bound = 1 / math.sqrt(base.in_features)
        chance = torch.Generator().manual_seed(seed)
        first = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=chance)
        self.lora_A = nn.Parameter(first)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """As the layer that it replaces, and its update where that is active."""
        plain = super().forward(x)
        if not self.active:
            return plain
        return plain + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


class Adapters:
    """The updates of a policy: put into its decoder layers when made, before it is sharded."""

    def __init__(self, policy: Policy, lora: Lora, seed: int) -> None:
        """Freezes everything else.

        Raises:
            ConfigError: no linear layer has one of the names that are asked for.
        """
        policy.requires_grad_(False)
        self._lora = lora
        self._policy = policy
        self._layers = {
            name: _replace(policy.lm, name, layer, lora, seed)
            for name, layer in _chosen(policy.lm, lora.targets)
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """The starting model, within the block."""
        for layer in self._layers.values():
            layer.active = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.active = True

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight of the model whole, with its update in it; a gather a tensor on all ranks."""
        for name, parameter in self._policy.weights():
            head, _, last = name.rpartition(".")
            if last in (A, B):
                continue
            whole = full(parameter.detach())
            layer = self._layers.get(head)
            if layer is not None and last == "weight":
                a, b = full(layer.lora_A.detach()), full(layer.lora_B.detach())
                whole = torch.addmm(whole, b, a, alpha=layer.scale)
            yield name, whole

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A and B of each layer whole, by PEFT's names; a gather a tensor on all ranks."""
        for name, layer in self._layers.items():
            for part in (A, B):
                parameter: nn.Parameter = getattr(layer, part)
                yield f"base_model.model.{name}.{part}.weight", full(parameter.detach())

    def config(self, base: str) -> dict[str, Any]:
        """PEFT's `adapter_config.json` for the model `base`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "target_modules": sorted({name.rpartition(".")[2] for name in self._layers}),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


class WithoutAdapters:
    """A policy's starting model, which answers as a policy does and takes no memory."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        self._policy = policy
        self._adapters = adapters

    def score(self, batch: PackedBatch, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See `Policy.score`."""
        with self._adapters.off():
            # It chooses its own experts.
            return self._policy.score(replace(batch, experts=None), rows, temperature)


def _chosen(lm: Any, targets: tuple[str, ...]) -> list[tuple[str, nn.Linear]]:
    """The linear layers of the decoder that have one of the names, or all; by full name."""
    inside = {id(m) for layer in decoder(lm.base_model).layers for m in layer.modules()}
    linear = [
        (name, module)
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]
    names = {name.rpartition(".")[2] for name, _ in linear}
    for target in targets:
        if target not in names:
            raise ConfigError(
                f"model.lora_target_modules: the decoder has no linear layer {target!r}; it has "
                f"{', '.join(sorted(names))}"
            )
    return [(n, m) for n, m in linear if not targets or n.rpartition(".")[2] in targets]


def _replace(lm: nn.Module, name: str, layer: nn.Linear, lora: Lora, seed: int) -> LoraLinear:
    own = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
    made = LoraLinear(layer, lora.rank, lora.alpha / lora.rank, own)
    parent, _, last = name.rpartition(".")
    setattr(lm.get_submodule(parent), last, made)
    return made
