"""Functions of one's own that the Megatron backend calls, with slime's signatures.

    custom_megatron_init(args)                      once a process, when megatron-core is set up:
                                                    before there is a model
    before_log_prob(args, model, store_prefix)      before log-probs of a batch by the policy (""),
                                                    the reference ("ref_") or a teacher
                                                    ("teacher_"), and before values by the
                                                    critic ("")
    before_train_step(args, rollout_id, step_id,    before forward and backward of an optimizer step
        model, optimizer, opt_param_scheduler)      of the policy or the critic

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
from rlcore.train.megatron.critic import TrainedCritic
from rlcore.train.megatron.network import Network, PolicyNetwork
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


class Calls:
    """The hooks of one model in a batch."""

    def __init__(self, hooks: Hooks, network: Network, prefix: str = "") -> None:
        """`prefix`: slime's, of the log-probs that the model is asked for."""
        self._hooks = hooks
        self._chunks = network.chunks
        self._prefix = prefix
        self._scored = False
        self._steps = 0

    def before_scores(self) -> None:
        """Log-probs or values of micro-batches are about to be computed: told once a batch."""
        if not self._scored:
            name = "custom_megatron_before_log_prob_hook_path"
            self._hooks.call(name, self._chunks, self._prefix)
        self._scored = True

    def before_step(self, rollout_id: int, optimizer: DistributedAdamW) -> None:
        """An optimizer step is about to begin."""
        name = "custom_megatron_before_train_step_hook_path"
        self._hooks.call(name, rollout_id, self._steps, self._chunks, optimizer, None)
        self._steps += 1


class Hooked:
    """A policy in a batch: what is asked of it goes by the hooks first."""

    def __init__(self, network: PolicyNetwork, hooks: Hooks, prefix: str = "") -> None:
        """`prefix`: as of `Calls`."""
        self._network = network
        self._calls = Calls(hooks, network, prefix)

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
        self._calls.before_scores()
        return self._network.score(micros, temperature)


class HookedTraining(Hooked):
    """The policy that is trained on a batch."""

    def __init__(
        self, network: PolicyNetwork, hooks: Hooks, optimizer: DistributedAdamW, rollout_id: int
    ) -> None:
        super().__init__(network, hooks)
        self._optimizer = optimizer
        self._rollout_id = rollout_id

    def accumulate(
        self, micros: Sequence[MicroBatch], loss: Loss, *, scale: float, temperature: float | None
    ) -> list[Metrics]:
        """See `TrainedPolicy`."""
        self._calls.before_step(self._rollout_id, self._optimizer)
        return self._network.accumulate(micros, loss, scale=scale, temperature=temperature)


class HookedCritic:
    """The critic that is trained on a batch."""

    def __init__(self, critic: TrainedCritic, hooks: Hooks, rollout_id: int) -> None:
        self._critic = critic
        self._calls = Calls(hooks, critic.model)
        self._rollout_id = rollout_id

    def values(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """See `CriticModel`."""
        self._calls.before_scores()
        return self._critic.model.values(micros)

    def accumulate(self, micros: Sequence[MicroBatch], loss: Loss) -> list[Metrics]:
        """See `CriticModel`."""
        self._calls.before_step(self._rollout_id, self._critic.optimizer)
        return self._critic.model.accumulate(micros, loss)
