"""What a trainer is, whatever runs below it: the protocol, and the records that go in and come out.

A trainer holds one policy with its optimizer. Its identity is `(loaded, dirty)`: `loaded` names the
state that it holds, `dirty` says that an optimizer step was begun and the batch not finished.
Training goes from a named state to a named state and refuses anything else, so a batch has its
effect exactly once however often the work is tried again (design: "Train is exactly once as an
effect").

Invariants:
- A `TrainError` before the first optimizer step leaves the trainer as it was; any other failure
  within a batch makes it dirty until a state is loaded.
- On more than one rank every method is called on all ranks, with the same arguments but for the
  batch's rows.
- Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rlcore.algorithms.aggregate import Totals

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.algorithms.packing import TrainSequence
    from rlcore.config.tree import ModelConfig
    from rlcore.images.processor import ImageProcessor
    from rlcore.store.manifest import FileRef
    from rlcore.train.ranks import Ranks
    from rlcore.weights.export import Adapter

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Lora:
    """Updates of low rank that are trained in place of the model's weights."""

    rank: int
    alpha: float
    """The update is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers; none: all of the decoder."""

    @classmethod
    def of(cls, model: ModelConfig) -> Lora | None:
        """What the configuration asks for."""
        if model.lora_rank is None:
            return None
        return cls(model.lora_rank, model.lora_alpha, tuple(model.lora_target_modules))


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The committed parts that iteration `iteration` trains on."""

    iteration: int
    rollout: tuple[FileRef, ...]
    reward: tuple[FileRef, ...]
    selection: tuple[FileRef, ...]


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One optimizer step, as one rank sees it."""

    micro_batches: tuple[tuple[TrainSequence, ...], ...]
    """This rank's sequences; as many micro-batches on every rank, some of them may be empty."""
    totals: Totals
    """Counts of the whole step, over all ranks: what the loss is normalised with."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One rollout batch, as one rank sees it."""

    iteration: int
    steps: tuple[TrainStep, ...]
    samples: int
    """Samples of all steps on all ranks."""
    tokens: int
    """Their tokens, prompts included."""
    rollout_log_probs: bool
    """Whether every sample of the batch has the engine's log-probs."""
    teacher_log_probs: bool = False
    """Whether every sample of the batch has a teacher's."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What is known of the batch before training, such as samples left out; goes into the
    report.
    """


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What one rollout batch did."""

    iteration: int
    state_id: str
    """The state that the trainer holds now."""
    optimizer_step: int
    """Optimizer steps since the start of the run."""
    metrics: dict[str, float]
    """Those without a '/' in their names are of the training itself."""

    @property
    def named(self) -> dict[str, float]:
        """The metrics by their names in a run."""
        return {k if "/" in k else f"train/{k}": value for k, value in self.metrics.items()}


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Identity of a trainer state by content: the same at any world size and in any file layout."""

    model_sha256: str
    optimizer_sha256: str
    """Moments and step count of the optimizer."""


class Trainer(Protocol):
    """One rank of a trainer."""

    loaded: str | None
    """Name of the state that is held; None before the first load."""
    dirty: bool
    """A batch was begun and not finished: the weights are those of no state."""

    @property
    def images(self) -> ImageProcessor | None:
        """Of the model that is held; None where it takes no images."""

    ranks: Ranks
    """Those that a batch is dealt out to; others beside this one may see the same samples."""

    def load(self, model_folder: Path, state_id: str) -> None:
        """Build the policy from a Hugging Face folder, with a fresh optimizer."""

    def load_state(self, folder: Path, state_id: str) -> StateDigest:
        """Replace everything by a saved state; returns the digest of what is held now."""

    def save_state(self, folder: Path) -> None:
        """Write this rank's share of the state into a local folder."""

    def digest(self) -> StateDigest:
        """Identity of the state that is held."""

    def train(self, prev_state_id: str, new_state_id: str, batch: TrainBatch) -> TrainReport:
        """All optimizer steps of one rollout batch: from one named state to the next."""

    def log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, at temperature 1."""

    def named_tensors(self, dtype: DType, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """Every weight whole and on a device, under its Hugging Face name; a gather a tensor on all
        ranks.
        """

    def adapter(self) -> Adapter:
        """The updates of low rank that are trained, whole; a gather a tensor on all ranks."""

    def export_hf(self, folder: Path, dtype: DType) -> None:
        """A Hugging Face folder that `from_pretrained` loads; rank 0 writes it."""

    def memory(self) -> dict[str, float]:
        """Bytes held, by kind."""

    def offload(self) -> None:
        """Keep all in the host's memory and free the device, until `onload`. Twice is once."""

    def onload(self, *, weights_only: bool = False) -> None:
        """Put back on the device what `offload` took: all, or what `log_probs`, `named_tensors` and
        `export_hf` need. Twice is once, and all may follow weights.
        """
