"""What the trainers of all backends have in common: how a trainer comes from state to state, the
rules around a batch, the reference, log-probs of given sequences, and figures of memory.
"""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import TrainSequence, pack
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import ConfigError, PluginError, TrainError
from rlcore.images.processor import ImageProcessor
from rlcore.train.backend import Models, Optimizer, Scores, TrainedPolicy
from rlcore.train.credit import MicroBatch
from rlcore.train.custom import Functions
from rlcore.train.fsdp.shards import ShardWriter
from rlcore.train.loop import BatchLoop, LoopSettings
from rlcore.train.offload import Offload, give_back_cache
from rlcore.train.out_of_memory import out_of_memory
from rlcore.train.ranks import Ranks
from rlcore.train.rates import learning_rate
from rlcore.train.trainer import DType, StateDigest, TrainBatch, TrainReport
from rlcore.train.warm_up import make_code
from rlcore.weights.export import Adapter, write_hf_folder

TORCH_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PolicyT = TypeVar("PolicyT")
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


class BaseTrainer(ABC, Generic[PolicyT, OptimizerT]):
    """One rank; see the protocol `Trainer` for what each method does.

    A backend builds models and optimizers and moves their tensors; when, is said here.
    """

    ranks: Ranks
    """That a batch is dealt out to."""
    images: ImageProcessor | None = None
    """Of the model that is held; None where it takes no images."""

    def __init__(
        self,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            train, algorithm: the settings.
            temperature: of the rollout.
            seed: of the run.
            device: of this process.
        """
        self.loaded: str | None = None
        self.dirty = False
        self._train = train
        self._algorithm = algorithm
        self._temperature = temperature
        self._seed = seed
        self._device = device
        self._offload = Offload(device)
        self._folder: Path | None = None
        self._policy: PolicyT | None = None
        self._optimizer: OptimizerT | None = None
        self._reference: PolicyT | None = None
        self._reference_moved = False
        self._teacher: PolicyT | None = None
        self._writer = ShardWriter()

    # --- for a backend to say ---------------------------------------------------------------------

    @abstractmethod
    def _load_trained(self, folder: Path) -> None:
        """Build all that is trained, with fresh optimizers, in place of what was."""

    @abstractmethod
    def _build(self, folder: Path) -> PolicyT:
        """A model that is not trained."""

    @abstractmethod
    def _vocabulary(self, model: PolicyT) -> int:
        """How many tokens it knows."""

    @abstractmethod
    def _make_like_policy(self, reference: PolicyT) -> None:
        """Give a model all that the policy has now."""

    @abstractmethod
    def _read_state(self, folder: Path) -> StateDigest:
        """Take a saved state."""

    @abstractmethod
    def _write_state(self, folder: Path) -> None:
        """This rank's share of what is held."""

    @abstractmethod
    def digest(self) -> StateDigest:
        """Identity of the state that is held."""

    @abstractmethod
    def _models(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> Models:
        """What a batch goes through."""

    @abstractmethod
    def _scores(self) -> Scores:
        """The policy, as far as log-probs go."""

    @abstractmethod
    def _gradient(self) -> Iterator[Tensor]:
        """This rank's share of the policy's, as its optimizer collected it."""

    @abstractmethod
    def _optimizers(self) -> Iterator[OptimizerT]:
        """Of all that is trained."""

    @abstractmethod
    def _for_export(self) -> Iterator[Tensor]:
        """This rank's tensors that log-probs and exports need."""

    @abstractmethod
    def _for_training(self) -> Iterator[Tensor]:
        """All other large ones."""

    def _zeros(self) -> Iterator[Tensor]:
        """What stays on the device and is zero between steps."""
        yield from ()

    @abstractmethod
    def _sizes(self) -> Mapping[str, int]:
        """Bytes of this rank's shares of all that stays from batch to batch, and of gradients."""

    @abstractmethod
    def _warm_up(self) -> None:
        """`_make_code` of what is there."""

    @property
    def _trains_adapter(self) -> bool:
        """Whether the policy is a model that stays as it is, and updates of low rank."""
        return False

    @abstractmethod
    def named_tensors(self, dtype: DType, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """See `Trainer`."""

    @abstractmethod
    def adapter(self) -> Adapter:
        """See `Trainer`."""

    # --- states -----------------------------------------------------------------------------------

    def load(self, model_folder: Path, state_id: str) -> None:
        """Build policy, optimizer and whatever else the settings ask for from a Hugging Face
        folder. What is frozen is built once.
        """
        self.loaded, self.dirty = None, True
        self._offload.take_back(weights_only=False)
        self._load_trained(model_folder)
        self._folder = model_folder
        own = self._reference is None or self._reference_moved
        if self._algorithm.needs_reference and own and not self._trains_adapter:
            self._build_reference()
        if self._algorithm.opd_teacher_load and self._teacher is None:
            self._teacher = self._build_teacher(Path(self._algorithm.opd_teacher_load))
        if self._compiles:
            self._warm_up()
        self._writer = ShardWriter()
        torch.manual_seed(self._seed)
        self.loaded, self.dirty = state_id, False

    def load_state(self, folder: Path, state_id: str) -> StateDigest:
        """Read a saved state in place; `load` must have built the model before."""
        self._held()
        self.loaded, self.dirty = None, True
        digest = self._read_state(folder)
        self.loaded, self.dirty = state_id, False
        return digest

    def save_state(self, folder: Path) -> None:
        """Write this rank's share of the state that is held."""
        self._held()
        if self.dirty:
            raise TrainError(
                "the trainer stopped in the middle of a batch, so it holds no state to save"
            )
        self._write_state(folder)

    def _held(self, *, weights_only: bool = False) -> tuple[PolicyT, OptimizerT]:
        """The policy and its optimizer.

        Raises:
            TrainError: there is none, or not on the device.
        """
        if self._policy is None or self._optimizer is None:
            raise TrainError("the trainer holds no model yet; call load first")
        self._offload.check(weights_only=weights_only)
        return self._policy, self._optimizer

    @property
    def _compiles(self) -> bool:
        """Whether torch compiles models: what it makes may differ in its last bits."""
        wanted = self._train.torch_compile and not self._train.deterministic
        return wanted and self._device.type == "cuda"

    def _make_code(self, policy: TrainedPolicy, frozen: Sequence[Scores]) -> None:
        """Have torch make the code of a step before there is one: engines start meanwhile."""
        _, optimizer = self._held()
        make_code(
            policy,
            frozen,
            self._device,
            max_tokens=self._train.max_tokens,
            temperature=self._temperature,
            with_entropy=self._algorithm.entropy_coef != 0,
        )
        optimizer.drop_gradients()

    # --- the reference ----------------------------------------------------------------------------

    def _build_reference(self) -> None:
        """Of the starting model."""
        assert self._folder is not None
        self._reference = None
        self._reference = self._build(self._folder)
        self._reference_moved = False

    @property
    def _following(self) -> PolicyT | None:
        """A reference that follows the policy: a part of the state."""
        return None if self._algorithm.ref_update_interval is None else self._reference

    def _settle_reference(self, *, stored: bool) -> None:
        """What the reference is to be before a state is read that has one stored, or has none."""
        if stored:
            self._reference_moved |= self._following is not None
        elif self._reference_moved:
            # A forefather's, whose reference stayed the starting model.
            self._build_reference()

    @torch.no_grad()
    def _follow(self, iteration: int) -> None:
        """Have the reference become the policy after an iteration where that is due."""
        interval, reference = self._algorithm.ref_update_interval, self._following
        if interval is None or reference is None or (iteration + 1) % interval:
            return
        self._reference_moved = True
        self._make_like_policy(reference)

    # --- training ---------------------------------------------------------------------------------

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
        return TrainReport(batch.iteration, new_state_id, self._held()[1].steps, metrics)

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

    def measure(
        self, batch: TrainBatch, algorithm: AlgorithmConfig
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Metrics and gradient of a batch's first step under other settings; nothing is applied.

        Args:
            batch: with the advantages that the settings make.
            algorithm: the settings; where they need a reference, the trainer's own must too.

        Returns:
            Metrics, and this rank's share of the gradient: a copy on the CPU.
        """
        _, optimizer = self._held()
        metrics = self._loop(algorithm, batch).measure()
        gradient = [part.to("cpu", copy=True).flatten() for part in self._gradient()]
        optimizer.drop_gradients()
        return metrics, gradient

    def _loop(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> BatchLoop:
        """What trains a batch.

        Raises:
            PluginError: a function of one's own cannot be loaded; nothing is begun.
        """
        total = self._train.num_iterations * self._train.num_steps_per_rollout
        settings = LoopSettings(
            algorithm=algorithm,
            temperature=self._temperature,
            clip_grad=self._train.clip_grad,
            lr=lambda step: learning_rate(step, total, self._train),
            critic_lr=lambda step: learning_rate(step, total, self._critic_train),
            device=self._device,
        )
        models = self._models(algorithm, batch)
        return BatchLoop(models, settings, batch, Functions(algorithm, self._temperature))

    @property
    def _critic_train(self) -> TrainConfig:
        """The optimizer's settings with the critic's learning rate."""
        rate = self._algorithm.critic_lr
        return self._train if rate is None else self._train.model_copy(update={"lr": rate})

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

    def export_hf(self, folder: Path, dtype: DType) -> None:
        """Write config, tokenizer and weights, and an adapter by itself; see `write_hf_folder`."""
        self._held(weights_only=True)
        if self._folder is None or self.dirty:
            raise TrainError(
                "the trainer stopped in the middle of a batch, so its weights are no model to "
                "export"
            )
        adapter = self.adapter() if self._trains_adapter else None
        tensors = self.named_tensors(dtype)
        if dist.get_rank() == 0:
            write_hf_folder(folder, self._folder, tensors, dtype, adapter)
        else:
            for _ in tensors:
                pass

    # --- memory -----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Gradients, which no state holds, are dropped."""
        if self._policy is None or self._optimizer is None:
            return
        if not self._offload.away:
            for optimizer in self._optimizers():
                optimizer.drop_gradients()
        self._offload.put_away(self._for_export(), self._for_training(), self._zeros())
        give_back_cache(self._device)

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

    def _build_teacher(self, folder: Path) -> PolicyT:
        """A teacher that reads the token ids of the policy.

        Raises:
            ConfigError: it is not there, or has another number of them.
        """
        if not folder.is_dir():
            raise ConfigError(
                f"algorithm.opd_teacher_load = {str(folder)!r} is not a folder on the trainer's "
                "machine; give a Hugging Face model folder that it sees"
            )
        teacher = self._build(folder)
        ours, theirs = self._vocabulary(self._held()[0]), self._vocabulary(teacher)
        if ours != theirs:
            raise ConfigError(
                f"algorithm.opd_teacher_load: the teacher in {folder} has a vocabulary of {theirs} "
                f"tokens, the model one of {ours}; both must read the same token ids"
            )
        return teacher
