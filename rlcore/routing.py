"""Which experts the layers of a mixture of experts choose: watched as a model computes, or given.

transformers' layers choose by `torch.topk` over scores [tokens, experts], within the module that
holds the experts; that call is where choices are seen and replaced.

Invariants:
- Only the choice is replaced. What the chosen experts weigh is computed by the model's own code
  from its own scores, so the gradient of the router is that of the experts it is told.
- Given the choice that it would make itself, a model computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlcore.errors import TrainError


class Routing:
    """The routers of a model's decoder layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.given: Tensor | None = None
        """int [tokens, layers, k] for the passes to come, recomputation in backward included; rows
        of layers without experts are not looked at. None: layers choose themselves."""
        self.replays = False
        """Whether what is given counts: a reference chooses for itself."""
        self.watches = False
        """Whether `seen` is kept."""
        self._layers = len(layers)
        self._chosen: dict[int, Tensor] = {}
        self._sparse: list[int] = []
        for number, layer in enumerate(layers):
            for block in layer.modules():
                experts: Any = getattr(block, "experts", None)
                if isinstance(getattr(experts, "gate_up_proj", None), nn.Parameter):
                    self._sparse.append(number)
                    block.forward = self._routed(number, experts.num_experts, block.forward)

    @property
    def has_experts(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self._sparse)

    def give(self, chosen: Tensor | None) -> None:
        """Set `given`, where it counts.

        Raises:
            TrainError: a layer with experts has no choice in it: all its rows are 0.
        """
        self.given = chosen if self.replays and self.has_experts else None
        if self.given is not None:
            check_recorded(self.given, self._sparse)

    def seen(self) -> Tensor:
        """int32 [tokens, layers, k]: what was chosen in the last pass; 0 in layers without
        experts.
        """
        some = next(iter(self._chosen.values()))
        out = torch.zeros((len(some), self._layers, some.shape[1]), dtype=torch.int32)
        out = out.to(some.device)
        for layer, chosen in self._chosen.items():
            out[:, layer] = chosen
        return out

    def _routed(self, layer: int, experts: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def routed(*args: Any, **kwargs: Any) -> Any:
            if self.given is None and not self.watches:
                return forward(*args, **kwargs)
            choice = _Choice(experts, None if self.given is None else self.given[:, layer].long())
            with choice:
                out = forward(*args, **kwargs)
            if choice.made is None:
                raise TrainError(
                    f"layer {layer} chooses its experts in a way that is not known here, so that "
                    "routing can be neither recorded nor replayed (use_routing_replay, "
                    "use_rollout_routing_replay)"
                )
            if self.watches:
                self._chosen[layer] = choice.made
            return out

        return routed


def check_recorded(given: Tensor, layers: Sequence[int]) -> None:
    """Whether experts [tokens, layers, k] that are to be replayed are those of some layers.

    Raises:
        TrainError: a layer has no choice in it: all its rows are 0.
    """
    if given.shape[-1] < 2 or not given.shape[0]:
        return
    filled = given.ne(0).any(dim=2).any(dim=0).tolist()
    if empty := [k for k in layers if not filled[k]]:
        raise TrainError(
            f"the experts to be replayed are all 0 in layer {empty[0]}: the engine has not "
            "recorded them; with SGLang, look whether it says so for this model"
        )


class _Choice(TorchFunctionMode):
    """Watches for the choice of experts, and makes it where one is given."""

    def __init__(self, experts: int, given: Tensor | None) -> None:
        super().__init__()
        self.made: Tensor | None = None
        self._experts = experts
        self._given = given

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk) or not self._of_experts(args[0]):
            return found
        if self._given is None:
            self.made = found.indices
            return found
        if self._given.shape != found.indices.shape:
            raise TrainError(
                f"experts {list(self._given.shape)} are to be replayed, but the layer chooses "
                f"{list(found.indices.shape)}"
            )
        self.made = self._given
        return torch.return_types.topk((args[0].gather(-1, self._given), self._given))

    def _of_experts(self, scores: Tensor) -> bool:
        return scores.ndim == 2 and scores.shape[1] == self._experts
