"""What the batch loop asks of a backend: models that micro-batches are passed through, and
optimizers.

Invariants:
- What a method returns is the same on all ranks that hold parts of one model together.
- Gradients of a step are those of the sum of its losses over all micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rlcore.algorithms.flops import ModelShape
from rlcore.algorithms.metrics import Metrics
from rlcore.train.credit import MicroBatch
from rlcore.train.ranks import Ranks

Loss = Callable[[MicroBatch, Any], tuple[Tensor, list[Metrics]]]
"""From a micro-batch and what the model answers: what is differentiated, and metrics."""


class Scores(Protocol):
    """A policy, as far as log-probs go."""

    def score(self, micros: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Log-probs [M] at the trained positions of each micro-batch; called without gradients."""


class Load(Protocol):
    """How evenly the experts of a model are used."""

    def reset(self) -> None:
        """Begin anew."""

    def figures(self) -> dict[str, float]:
        """Over all ranks since the last reset; none without experts."""


class TrainedPolicy(Scores, Protocol):
    """A policy that is trained."""

    @property
    def expert_load(self) -> Load:
        """How evenly its experts are used."""

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""

    @property
    def frozen(self) -> bool:
        """Whether some of its weights are not trained."""

    def accumulate(
        self, micros: Sequence[MicroBatch], loss: Loss, *, scale: float, temperature: float | None
    ) -> list[Metrics]:
        """Forward and backward of a step's micro-batches; gradients add up on the parameters.

        Args:
            micros: of the step, as many on every rank.
            loss: of one; it gets log-probs [M] and entropies [M].
            scale: losses are multiplied by it.
            temperature: logits are divided by it; None: `loss` gets logits [T, V] of all tokens.

        Returns:
            The metrics of all micro-batches.
        """


class CriticModel(Protocol):
    """A critic that is trained."""

    def values(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Values [M] at the trained positions of each micro-batch; called without gradients."""

    def accumulate(self, micros: Sequence[MicroBatch], loss: Loss) -> list[Metrics]:
        """As a policy's; `loss` gets values [M]."""


class Optimizer(Protocol):
    """Of one model."""

    steps: int
    """Taken since the start of the run."""

    def collect_gradients(self) -> float:
        """Take over what was accumulated; the norm of the whole gradient, before clipping."""

    def step(self, lr: float, scale: float) -> None:
        """Multiply the gradients by `scale` and apply them."""

    def drop_gradients(self) -> None:
        """Free the gradients, applied or not."""


class Critic(NamedTuple):
    """A critic with its optimizer."""

    model: CriticModel
    optimizer: Optimizer


@dataclass(frozen=True)
class Models:
    """What a batch goes through."""

    policy: TrainedPolicy
    optimizer: Optimizer
    """Of the policy."""
    ranks: Ranks
    """That the batch is dealt out to."""
    critic: Critic | None = None
    reference: Scores | None = None
    """The starting model, where a divergence from it is asked for."""
    teacher: Scores | None = None
    """For on-policy distillation."""
