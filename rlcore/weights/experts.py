"""Weights of experts, which a model holds as one tensor a layer, under their names in checkpoints.

transformers stacks the experts of a layer: `mlp.experts.gate_up_proj` [n, 2 width, hidden], the
rows of the gate before those of the other projection, and `mlp.experts.down_proj` [n, hidden,
width].
Checkpoints of the Qwen, DeepSeek and GLM families, and engines, know each expert by itself:
`mlp.experts.7.up_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS = ".mlp.experts"
_PARTS = {
    "gate_proj.weight": ("gate_up_proj", 0, 2),
    "up_proj.weight": ("gate_up_proj", 1, 2),
    "down_proj.weight": ("down_proj", 0, 1),
}


def is_stacked(name: str) -> bool:
    """Whether a parameter holds the weights of all experts of a layer."""
    head, _, last = name.rpartition(".")
    return head.endswith(_EXPERTS) and last in ("gate_up_proj", "down_proj")


def place_in_stack(name: str) -> tuple[str, int, int, int] | None:
    """Where the weight of an expert lies: (name of all of them, which expert, which of the parts of
    its rows, how many parts there are); None: it is none.
    """
    head, found, last = name.partition(f"{_EXPERTS}.")
    expert, _, part = last.partition(".")
    if not found or part not in _PARTS:
        return None
    stack, number, parts = _PARTS[part]
    return f"{head}{_EXPERTS}.{stack}", int(expert), number, parts


def by_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter under its names in a checkpoint, one or many: views of `tensor`."""
    if not is_stacked(name):
        yield name, tensor
        return
    head, _, last = name.rpartition(".")
    for k, own in enumerate(tensor):
        if last == "down_proj":
            yield f"{head}.{k}.down_proj.weight", own
        else:
            gate, up = own.chunk(2)
            yield f"{head}.{k}.gate_proj.weight", gate
            yield f"{head}.{k}.up_proj.weight", up
