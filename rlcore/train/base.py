"""What the trainers of all backends have in common: the rules around a batch, log-probs of given
sequences, and figures of memory.
"""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import TrainSequence, pack
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import ConfigError, PluginError, TrainError
from rlcore.train.backend import Optimizer, Scores
from rlcore.train.credit import MicroBatch
from rlcore.train.loop import BatchLoop
from rlcore.train.offload import Offload
from rlcore.train.out_of_memory import out_of_memory
from rlcore.train.trainer import DType, TrainBatch, TrainReport

TORCH_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class BaseTrainer(ABC):
    """One rank; see the protocol `Trainer` for what each method does.

    A backend builds models and optimizers, and says by `_loop`, `_scores` and `_sizes` what they
    are.
    """

    def __init__(
        self, train: TrainConfig, algorithm: AlgorithmConfig, device: torch.device
    ) -> None:
        self.loaded: str | None = None
        self.dirty = False
        self._train = train
        self._algorithm = algorithm
        self._device = device
        self._offload = Offload(device)

    # --- for a backend to say ---------------------------------------------------------------------

    @abstractmethod
    def _loop(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> BatchLoop:
        """What trains a batch."""

    @abstractmethod
    def _stepped(self) -> Optimizer:
        """The policy's optimizer."""

    @abstractmethod
    def _scores(self) -> Scores:
        """The policy, as far as log-probs go."""

    @abstractmethod
    def _sizes(self) -> Mapping[str, int]:
        """Bytes of this rank's shares of all that stays from batch to batch, and of gradients."""

    @abstractmethod
    def _follow(self, iteration: int) -> None:
        """What is due after an iteration."""

    # --- what follows -----------------------------------------------------------------------------

    def train(self, prev_state_id: str, new_state_id: str, batch: TrainBatch) -> TrainReport:
        """All optimizer steps of one batch; see `BatchLoop.run`."""
        self._check_can_train(prev_state_id)
        loop = self._loop(self._algorithm, batch)
        self.dirty = True
        try:
            metrics = loop.run()
        except (TrainError, PluginError):
            self.dirty = loop.stepped
            raise
        except torch.OutOfMemoryError as error:
            # A backend may have stopped amid a pass, of which nothing is of use: dirty it stays.
            what = f"iteration {batch.iteration}"
            raise out_of_memory(error, self._sizes(), self._device, self._train, what) from None
        self._follow(batch.iteration)
        self.loaded, self.dirty = new_state_id, False
        counts = {"tokens": float(batch.tokens), "samples": float(batch.samples)}
        metrics = batch.metrics | metrics | counts
        return TrainReport(batch.iteration, new_state_id, self._stepped().steps, metrics)

    def _check_can_train(self, prev_state_id: str) -> None:
        """The rule of exactly once.

        Raises:
            TrainError: not `prev_state_id` is held, or not untouched; load that state first.
        """
        if self.loaded != prev_state_id:
            raise TrainError(
                f"the trainer holds state {self.loaded!r}, not {prev_state_id!r}; load that one "
                "first"
            )
        if self.dirty:
            raise TrainError(
                f"the trainer stopped in the middle of a batch; load state {prev_state_id!r} again "
                "first"
            )

    @torch.no_grad()
    def log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens[1:] at temperature 1, in the precision that training computes in."""
        scores, parts = self._scores(), list(self._cut(sequences))
        micros = []
        for part in parts:
            untrained = [TrainSequence(ids, len(ids) - 1, trainable=False) for ids in part]
            packed = pack(untrained, Totals(0, 0), "token_mean").inputs().to(self._device)
            rows = torch.arange(len(packed.input_ids), device=self._device)
            micros.append(MicroBatch(packed, rows, packed.lengths, packed.advantages))
        out: list[list[float]] = []
        for part, micro, found in zip(parts, micros, scores.score(micros, 1.0), strict=True):
            values = found.cpu().split(micro.lengths)
            # A lone token was passed through all the same, and predicts nothing.
            out.extend(v[: len(ids) - 1].tolist() for ids, v in zip(part, values, strict=True))
        return out

    def _cut(self, sequences: list[list[int]]) -> Iterator[list[list[int]]]:
        """Runs of sequences that fit into a micro-batch, or a single longer one."""
        part: list[list[int]] = []
        for ids in sequences:
            if part and sum(map(len, part)) + len(ids) > self._train.max_tokens:
                yield part
                part = []
            part.append(ids)
        if part:
            yield part

    def onload(self, *, weights_only: bool = False) -> None:
        """Everything comes back where it was."""
        self._offload.take_back(weights_only=weights_only)

    def memory(self) -> dict[str, float]:
        """Peak resident memory of the process, and on a GPU what torch holds and held at most."""
        held = {"host_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}
        if self._device.type == "cuda":
            held["device_bytes"] = float(torch.cuda.memory_allocated(self._device))
            held["device_peak_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return held


def check_teacher_folder(folder: Path) -> None:
    """A teacher is there to be read.

    Raises:
        ConfigError: it is not.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"algorithm.opd_teacher_load = {str(folder)!r} is not a folder on the trainer's "
            "machine; give a Hugging Face model folder that it sees"
        )


def check_vocabularies(folder: Path, ours: int, theirs: int) -> None:
    """A teacher reads the token ids of the policy.

    Raises:
        ConfigError: it has another number of them.
    """
    if ours != theirs:
        raise ConfigError(
            f"algorithm.opd_teacher_load: the teacher in {folder} has a vocabulary of {theirs} "
            f"tokens, the model one of {ours}; both must read the same token ids"
        )
