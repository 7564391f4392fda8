"""Routers of a mixture of experts: megatron-core's, told which tokens they are given.

From that it tells padding from tokens, counts those of each expert, and chooses the experts that
are to be replayed.

A layer that is computed again in backward must find the tokens that it had. By then other
micro-batches have passed, but a layer has them come back in the order in which they came: what
passes through in training without gradients is kept in line until it comes again with them.

Invariants:
- A token counts once however often activations are computed again; padding, and a token that only
  keeps a rank company, does not.
- A loss of the routers is a mean over the tokens of a step: that of a micro-batch weighs as much as
  its tokens do.
- Only the choice is replaced. What the chosen experts weigh is computed by megatron-core from the
  router's own scores, so the gradient of the router is that of the experts it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_updated_expert_bias,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlcore.errors import TrainError
from rlcore.models.architecture import Architecture
from rlcore.routing import check_recorded
from rlcore.train.credit import MicroBatch
from rlcore.train.expert_load import load_figures


@dataclass(eq=False)
class Tokens:
    """Those of a micro-batch that this rank's routers get."""

    first: int
    """Where they begin among all of the micro-batch, padding included."""
    count: int
    """How many there are."""
    whole: int
    """How many the micro-batch has, without padding."""
    real: int
    """How many of them, the first ones, are no padding."""
    trained: bool
    """Whether they come back in backward."""
    counted: bool
    """Whether the use of experts is counted: they are trained on, and samples'."""
    shares: tuple[float, float] = (0.0, 0.0)
    """Of the micro-batch, and of these tokens, in all tokens of the step."""
    given: Tensor | None = None
    """int64 [count, layers, k] experts to choose; None: routers choose themselves."""
    chosen: Tensor | None = None
    """The same, where choices are watched: filled as they pass through."""


class Choice:
    """What megatron-core asks for the experts of tokens, in the place of its `RouterReplay`."""

    def __init__(self) -> None:
        self.given: Tensor | None = None
        """int64 [tokens, k]; None: the best by their scores."""
        self.made: Tensor | None = None
        """int64 [tokens, k]: the last choice."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [tokens, k]; megatron-core's name and arguments."""
        if self.given is None:
            values, self.made = default_compute_topk(scores, topk, num_groups, group_topk)
            return values, self.made
        self.made = self.given
        return scores.gather(1, self.given), self.given


class Router(TopKRouter):
    """One layer's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = self.choice = Choice()
        self.now: Tokens | None = None
        """What passes through next, where it is not computed again."""
        self.again: deque[Tokens] = deque()
        """What will be computed again."""
        self.shares = (0.0, 0.0)
        """See `Tokens`: of those that are at hand."""
        self.layer = -1
        """Its number in the model, from 0 on."""
        self.load: Tensor | None = None
        """int64 [experts]: tokens that each was given."""
        self.step_load: Tensor | None = None
        """The same, since the bias was last moved."""
        self.losses: dict[str, Tensor] = {}
        """float32: those that joined in backward, by name and without their coefficients: sums over
        the micro-batches of steps, each with its share.
        """

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Probabilities and choice of experts for each of this rank's tokens."""
        if self.now is None:
            return super().forward(hidden)
        if repeated := torch.is_grad_enabled() and len(self.again) > 0:
            tokens = self.again.popleft()
        else:
            tokens = self.now
            if tokens.trained and not torch.is_grad_enabled():
                self.again.append(tokens)
        given = tokens.given
        self.choice.given = None if given is None else given[:, self.layer]
        self.choice.made = None
        self.shares = tokens.shares
        probs, routed = super().forward(hidden, _padding(tokens, hidden))
        if not repeated:
            self._note(tokens, routed)
        return probs, routed

    def _note(self, tokens: Tokens, routed: Tensor) -> None:
        """Look at what came of tokens that passed for the first time; `routed` is [T, experts]."""
        made = self.choice.made
        if made is not None:
            if tokens.chosen is not None:
                tokens.chosen[:, self.layer] = made
        elif tokens.given is not None or tokens.chosen is not None:
            raise TrainError(
                f"layer {self.layer} chooses its experts in a way that cannot be told "
                "(megatron.moe_router_fusion?), so that routing can be neither recorded nor "
                "replayed (use_routing_replay, use_rollout_routing_replay)"
            )
        if tokens.counted:
            found = routed[: tokens.real].sum(0, dtype=torch.int64)
            self.load = found if self.load is None else self.load + found
            self.step_load = found if self.step_load is None else self.step_load + found

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Have the loss of an uneven choice, in a micro-batch, join the others in backward."""
        self._add("aux_loss", aux_loss / aux_loss_coeff, self.shares[0])
        joined: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * self.shares[0])
        return joined

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The same for the mean square of what normalises the scores of this rank's tokens."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not torch.is_grad_enabled():
            return logits
        loss = z_loss_func(logits, coefficient, padding_mask=padding_mask)
        self._add("z_loss", loss / coefficient, self.shares[1])
        joined: Tensor = MoEAuxLossAutoScaler.apply(logits, loss * self.shares[1])
        return joined

    def _add(self, name: str, loss: Tensor, share: float) -> None:
        """Note a loss; only what is passed with gradients has one, so each counts once."""
        part = loss.detach().float() * share
        self.losses[name] = self.losses[name] + part if name in self.losses else part

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Nothing: `load` has the counts."""


class Routers:
    """Those of this rank's runs of layers."""

    def __init__(self, chunks: Sequence[GPTModel], arch: Architecture) -> None:
        self.replays = False
        """Whether experts that come with micro-batches are chosen: a reference chooses itself."""
        self.watches = False
        """Whether micro-batches that are scored get the experts that were chosen."""
        self.moved = False
        """Whether biases are no longer those that training began with."""
        self._arch = arch
        self._device = next(chunks[0].parameters()).device
        config = chunks[0].config
        self._rate = config.moe_router_bias_update_rate
        coefficients = {"aux_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
        self._losses = [name for name, coefficient in coefficients.items() if coefficient]
        self._steps = 0
        """That passed with losses, since the figures were reset."""
        self._here: dict[int, Router] = {}
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                router = getattr(layer.mlp, "router", None)
                if isinstance(router, Router):
                    router.layer = layer.layer_number - 1
                    self._here[router.layer] = router

    # --- tokens -----------------------------------------------------------------------------------

    def begin(self, tokens: Sequence[Tokens]) -> None:
        """Before micro-batches are passed through; all ranks call it."""
        self.take(None)
        for router in self._here.values():
            router.again.clear()
        if self._here and self._losses:
            counted = [one for one in tokens if one.counted]
            found = torch.tensor(sum(one.whole for one in counted), device=self._device)
            dist.all_reduce(found, group=parallel_state.get_data_parallel_group())
            step = int(found)
            self._steps += step > 0
            for one in counted:
                one.shares = (one.whole / step, one.real / step)

    def take(self, tokens: Tokens | None) -> None:
        """What passes through next."""
        for router in self._here.values():
            router.now = tokens

    def tokens(self, micro: MicroBatch, first: int, count: int, *, trained: bool) -> Tokens:
        """This rank's tokens of a micro-batch: `count` from `first` on, some of them padding.

        Raises:
            TrainError: the experts that come with it are not those of such a model.
        """
        whole = len(micro.packed.input_ids)
        real = min(max(whole - first, 0), count)
        tokens = Tokens(first, count, whole, real, trained, counted=trained and not micro.empty)
        if not self._here:
            return tokens
        if self.replays and (experts := micro.packed.experts) is not None:
            self._check(experts)
            tokens.given = self._any(count, experts.device)
            tokens.given[:real] = experts[first : first + real]
        elif self.watches and not trained:
            tokens.chosen = self._any(count, micro.rows.device)
        return tokens

    def record(self, micro: MicroBatch, tokens: Tokens) -> None:
        """Have a micro-batch keep the experts that were chosen for it, where they are watched; all
        ranks that have a part of its tokens call it. Layers of other stages stay 0.
        """
        if tokens.chosen is None:
            return
        whole = tokens.chosen.new_zeros(tokens.whole, *tokens.chosen.shape[1:])
        whole[tokens.first : tokens.first + tokens.real] = tokens.chosen[: tokens.real]
        dist.all_reduce(whole, group=parallel_state.get_tensor_and_context_parallel_group())
        micro.packed = replace(micro.packed, experts=whole.int())

    def _any(self, count: int, device: torch.device) -> Tensor:
        """int64 [count, layers, k]: some experts or other, as padding needs them."""
        layers, k = self._arch.num_hidden_layers, self._arch.num_experts_per_tok
        return torch.arange(k, device=device).repeat(count, layers, 1)

    def _check(self, experts: Tensor) -> None:
        wanted = [self._arch.num_hidden_layers, self._arch.num_experts_per_tok]
        if list(experts.shape[1:]) != wanted:
            raise TrainError(
                f"experts {list(experts.shape[1:])} a token are to be replayed (layers, experts), "
                f"but the model chooses {wanted}"
            )
        check_recorded(experts, sorted(self._here))

    @torch.no_grad()
    def balance(self) -> None:
        """After an optimizer step: have biases move against the use of experts in it, where the
        settings say so (arXiv 2408.15664); all ranks call it.
        """
        if not self._rate:
            return
        self.moved = True
        biased = [router for router in self._here.values() if router.expert_bias is not None]
        if not biased:
            return
        loads = torch.zeros(len(biased), self._arch.num_experts, device=self._device)
        for row, router in zip(loads, biased, strict=True):
            if router.step_load is not None:
                row.copy_(router.step_load)
            router.step_load = None
        held = torch.stack([router.expert_bias for router in biased])
        for router, bias in zip(
            biased, get_updated_expert_bias(loads, held, self._rate), strict=True
        ):
            router.expert_bias.copy_(bias)

    # --- how experts are used ---------------------------------------------------------------------

    def reset(self) -> None:
        """See `Load`."""
        self._steps = 0
        for router in self._here.values():
            router.load = router.step_load = None
            router.losses = {}

    def figures(self) -> dict[str, float]:
        """See `Load`."""
        sparse = [k for k in range(self._arch.num_hidden_layers) if self._arch.is_sparse(k)]
        if not sparse:
            return {}
        sizes = len(sparse), self._arch.num_experts
        counts = torch.zeros(sizes, dtype=torch.int64, device=self._device)
        for row, layer in enumerate(sparse):
            if layer in self._here and (load := self._here[layer].load) is not None:
                counts[row] = load
        dist.all_reduce(counts)
        return load_figures(counts) | self._of_losses(len(sparse))

    def _of_losses(self, layers: int) -> dict[str, float]:
        """Means of the losses over layers and steps, without their coefficients."""
        if not self._losses:
            return {}
        sums = torch.zeros(1 + len(self._losses), dtype=torch.float64, device=self._device)
        sums[0] = self._steps
        for router in self._here.values():
            for k, name in enumerate(self._losses, 1):
                sums[k] += router.losses.get(name, 0.0)
        # A stage without experts counts no steps.
        dist.all_reduce(sums[:1], dist.ReduceOp.MAX)
        dist.all_reduce(sums[1:])
        steps, *found = sums.tolist()
        if not steps:
            return {}
        return {
            f"moe/{name}": total / (layers * steps)
            for name, total in zip(self._losses, found, strict=True)
        }


def _padding(tokens: Tokens, hidden: Tensor) -> Tensor | None:
    """bool like the tokens of `hidden` [T, B, H]: which are padding; None: none is."""
    if tokens.real == tokens.count:
        return None
    at = torch.arange(tokens.count, device=hidden.device)
    return (at >= tokens.real).view(hidden.shape[:2])
