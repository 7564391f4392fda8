"""Functions of one's own that the Megatron backend calls, with slime's signatures.

    custom_megatron_init(args)                      when a rank's model is laid out
    before_log_prob(args, model, store_prefix)      before log-probs of a batch by the policy (""),
                                                    the reference ("ref_"), a teacher ("teacher_")
    before_train_step(args, rollout_id, step_id,    before forward and backward of an optimizer step
        model, optimizer, opt_param_scheduler)

`model` is the list of this rank's chunks of the model, `optimizer` a `DistributedAdamW`. There is
no scheduler, since the learning rate follows from the step: None. Every rank calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rlcore.algorithms.flops import ModelShape
from rlcore.algorithms.metrics import Metrics
from rlcore.config.tree import MegatronTable, TrainConfig
from rlcore.errors import PluginError, SluiceError
from rlcore.plugins import MEGATRON, load_checked
from rlcore.rollout.args import PluginArgs
from rlcore.train.backend import Load, Loss
from rlcore.train.credit import MicroBatch
from rlcore.train.megatron.network import PolicyNetwork
from rlcore.train.megatron.optimizer import DistributedAdamW


class Hooks:
    """Those that the settings name."""

    def __init__(self, train: TrainConfig, megatron: MegatronTable) -> None:
        """
        Raises:
            PluginError: one cannot be loaded, or has another signature.
        """
        self._args = PluginArgs({**train.model_dump(), **megatron})
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, kind in MEGATRON.items():
            if (path := getattr(train, name)) is not None:
                self._functions[name] = load_checked(path, f"train.{name}", kind)

    def call(self, name: str, *given: Any) -> None:
        """Call one, where there is one.

        Args:
            name: of its setting.
            given: its arguments but for `args`.

        Raises:
            PluginError: it raised something.
        """
        function = self._functions.get(name)
        if function is None:
            return
        try:
            function(self._args, *given)
        except SluiceError:
            raise
        except Exception as error:
            # A custom function may raise anything.
            raise PluginError(f"train.{name} raised {type(error).__name__}: {error}") from error


class Hooked:
    """A policy in a batch: what is asked of it goes by the hooks first."""

    def __init__(self, network: PolicyNetwork, hooks: Hooks, prefix: str = "") -> None:
        """`prefix`: slime's, of the log-probs that it is asked for."""
        self._network = network
        self._hooks = hooks
        self._prefix = prefix
        self._told = False

    @property
    def expert_load(self) -> Load:
        """See `TrainedPolicy`."""
        return self._network.expert_load

    @property
    def shape(self) -> ModelShape:
        """See `TrainedPolicy`."""
        return self._network.shape

    @property
    def frozen(self) -> bool:
        """See `TrainedPolicy`."""
        return self._network.frozen

    def score(self, micros: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """See `Scores`."""
        if not self._told:
            name = "custom_megatron_before_log_prob_hook_path"
            self._hooks.call(name, self._network.chunks, self._prefix)
        self._told = True
        return self._network.score(micros, temperature)


class HookedTraining(Hooked):
    """The policy that is trained on a batch."""

    def __init__(
        self, network: PolicyNetwork, hooks: Hooks, optimizer: DistributedAdamW, rollout_id: int
    ) -> None:
        super().__init__(network, hooks)
        self._optimizer = optimizer
        self._rollout_id = rollout_id
        self._steps = 0

    def accumulate(
        self, micros: Sequence[MicroBatch], loss: Loss, *, scale: float, temperature: float | None
    ) -> list[Metrics]:
        """See `TrainedPolicy`."""
        self._hooks.call(
            "custom_megatron_before_train_step_hook_path",
            self._rollout_id,
            self._steps,
            self._network.chunks,
            self._optimizer,
            None,
        )
        self._steps += 1
        return self._network.accumulate(micros, loss, scale=scale, temperature=temperature)
