"""One rank of the Megatron trainer: the `Trainer` protocol over a model laid out on ranks.

Losses, credit, packing, metrics and checks are those of every backend (`rlcore.train.loop`); here
is how the model lies on ranks.

Invariants: torch.distributed is initialised before a trainer is made; all methods are entered by
all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms.flops import ModelShape
from rlcore.config.tree import AlgorithmConfig, MegatronTable, TrainConfig
from rlcore.conversion.sources import HfFolder, Weights
from rlcore.errors import ConfigError, TrainError
from rlcore.images.processor import ImageProcessor
from rlcore.models.hf_config import read_hf_config
from rlcore.train.backend import Models
from rlcore.train.base import (
    TORCH_DTYPES,
    BaseTrainer,
    check_teacher_folder,
    check_vocabularies,
)
from rlcore.train.custom import Functions
from rlcore.train.fsdp.model import current_device
from rlcore.train.loop import BatchLoop, LoopSettings
from rlcore.train.megatron import parallel, state
from rlcore.train.megatron.chunks import ChunkWriter
from rlcore.train.megatron.cpu import without_cuda
from rlcore.train.megatron.held import Held, held_by
from rlcore.train.megatron.hooks import Hooked, HookedTraining, Hooks
from rlcore.train.megatron.model import build_model
from rlcore.train.megatron.network import PolicyNetwork
from rlcore.train.megatron.optimizer import MOMENTS, DistributedAdamW
from rlcore.train.megatron.settings import Settings, check_layout
from rlcore.train.megatron.weights import load_weights, own_share, united
from rlcore.train.offload import give_back_cache
from rlcore.train.out_of_memory import bytes_of_all
from rlcore.train.rates import learning_rate
from rlcore.train.trainer import (
    DType,
    Lora,
    StateDigest,
    TrainBatch,
)
from rlcore.weights.export import Adapter, write_hf_folder
from rlcore.weights.megatron import Rule, rules


class MegatronTrainer(BaseTrainer):
    """See the protocol for what each method does."""

    images: ImageProcessor | None = None
    """No model here takes any."""

    def __init__(
        self,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int,
        device: str,
        trust_remote_code: bool = False,
        lora: Lora | None = None,
        megatron: MegatronTable | None = None,
    ) -> None:
        """`temperature` is the rollout's; `device` is `cpu` or `cuda` (this process's current
        one); `megatron` are settings by megatron-core's names.

        Raises:
            ConfigError: a setting that this backend does not have, or a layout that does not fit.
        """
        super().__init__(train, algorithm, current_device(device))
        self._temperature = temperature
        self._seed = seed
        self._settings = Settings.of(megatron or {}, train)
        _check(algorithm, train, lora)
        self._hooks = Hooks(train, megatron or {})
        parallel.set_up(self._settings.layout)
        self.ranks = parallel.data_ranks()
        self._folder: Path | None = None
        self._policy: PolicyNetwork | None = None
        self._reference: PolicyNetwork | None = None
        self._teacher: PolicyNetwork | None = None
        self._optimizer: DistributedAdamW | None = None
        self._held_tensors: list[Held] = []
        self._homes: dict[int | None, int] = {}
        self._writer = ChunkWriter()

    # --- state ------------------------------------------------------------------------------------

    def load(self, model_folder: Path, state_id: str) -> None:
        """Build policy, optimizer and, where a divergence is asked for, the frozen reference,
        from a Hugging Face folder.
        """
        self.loaded, self.dirty = None, True
        self._offload.take_back(weights_only=False)
        self._policy = self._optimizer = None
        self._policy = self._build(model_folder)
        if self._algorithm.needs_reference and self._reference is None:
            self._reference = self._build(model_folder)
        if self._algorithm.opd_teacher_load and self._teacher is None:
            self._teacher = self._build_teacher(Path(self._algorithm.opd_teacher_load))
        self._held_tensors = list(held_by(self._policy.chunks, self._policy.arch))
        weights = [weight for held in self._held_tensors if (weight := held.weight) is not None]
        self._optimizer = DistributedAdamW(
            self._policy.chunks, weights, self._train, self._settings.copies
        )
        if self._train.precision != "float32":
            # Masters are the folder's weights, not what the precision of the model left of them.
            stored = Weights(self._policy.arch, HfFolder(model_folder))
            for held in self._held_tensors:
                if held.parameter is not None:
                    whole = own_share(held.rule, stored.read, held.tensor)
                    self._optimizer.write("model", held.name, whole.to(self._device))
        self._homes = _homes(self._held_tensors)
        self._writer = ChunkWriter()
        self._folder = model_folder
        self._hooks.call("custom_megatron_init_path")
        torch.manual_seed(self._seed)
        self.loaded, self.dirty = state_id, False

    def load_state(self, folder: Path, state_id: str) -> StateDigest:
        """Read a saved state in place; `load` must have built the model before."""
        self._held()
        assert self._folder is not None
        self.loaded, self.dirty = None, True
        digest = state.load(folder, self._parts(), self._folder)
        self.loaded, self.dirty = state_id, False
        return digest

    def save_state(self, folder: Path) -> None:
        """Write this rank's share of the state that is held."""
        self._held()
        if self.dirty:
            raise TrainError(
                "the trainer stopped in the middle of a batch, so it holds no state to save"
            )
        state.save(folder, self._parts(), self._writer)

    def digest(self) -> StateDigest:
        """Digests of what is held."""
        self._held()
        return state.digest(self._parts())

    def _build(self, folder: Path) -> PolicyNetwork:
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path: {folder} has no config.json; give a Hugging Face model folder"
            )
        arch = read_hf_config(folder)
        layout = self._settings.layout
        check_layout(arch, layout)
        weights = Weights(arch, HfFolder(folder))
        runs = range(layout.virtual_pipeline) if layout.virtual_pipeline else (None,)
        with without_cuda():
            chunks = [
                build_model(arch, layout, self._train.precision, self._settings.more, run)
                for run in runs
            ]
            for chunk in chunks:
                load_weights(chunk.train(), arch, weights.read)
        shape = ModelShape.of(SimpleNamespace(**json.loads((folder / "config.json").read_text())))
        return PolicyNetwork(chunks, arch, layout, shape)

    def _build_teacher(self, folder: Path) -> PolicyNetwork:
        check_teacher_folder(folder)
        teacher, policy = self._build(folder), self._policy
        assert policy is not None
        check_vocabularies(folder, policy.arch.vocab_size, teacher.arch.vocab_size)
        return teacher

    def _held(self, *, weights_only: bool = False) -> tuple[PolicyNetwork, DistributedAdamW]:
        if self._policy is None or self._optimizer is None:
            raise TrainError("the trainer holds no model yet; call load first")
        self._offload.check(weights_only=weights_only)
        return self._policy, self._optimizer

    def _parts(self) -> list[state.Part]:
        _, optimizer = self._held()
        return [state.Part(self._held_tensors, optimizer)]

    # --- training ---------------------------------------------------------------------------------

    def _loop(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> BatchLoop:
        policy, optimizer = self._held()
        total = self._train.num_iterations * self._train.num_steps_per_rollout
        settings = LoopSettings(
            algorithm=algorithm,
            temperature=self._temperature,
            clip_grad=self._train.clip_grad,
            lr=lambda step: learning_rate(step, total, self._train),
            device=self._device,
        )
        hooks, reference, teacher = self._hooks, self._reference, self._teacher
        models = Models(
            HookedTraining(policy, hooks, optimizer, batch.iteration),
            optimizer,
            self.ranks,
            reference=None if reference is None else Hooked(reference, hooks, "ref_"),
            teacher=None if teacher is None else Hooked(teacher, hooks, "teacher_"),
        )
        return BatchLoop(models, settings, batch, Functions(algorithm, self._temperature))

    def _stepped(self) -> DistributedAdamW:
        return self._held()[1]

    def _follow(self, iteration: int) -> None:
        """Nothing: a reference that follows the policy is refused."""

    def _scores(self) -> PolicyNetwork:
        return self._held(weights_only=True)[0]

    # --- weights ----------------------------------------------------------------------------------

    @torch.no_grad()
    def named_tensors(self, dtype: DType, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, on a device, by its name in published folders; a tied one under
        the embedding's.
        """
        policy, optimizer = self._held(weights_only=True)
        optimizer.settle()
        own = {id(held.rule): held for held in self._held_tensors}
        by_name = {held.rule.megatron: held for held in own.values() if not held.repeated}
        for rule in rules(policy.arch):
            held = by_name.get(rule.megatron)
            for name, whole in self._everywhere(rule, held, TORCH_DTYPES[dtype]):
                yield name, whole.to(device)

    def _everywhere(
        self, rule: Rule, held: Held | None, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face's tensors of a rule, on every rank: from those that hold them."""
        policy, optimizer = self._held(weights_only=True)
        stages, experts = parallel.stages(), parallel.expert_ranks()
        if held is None:
            found = [
                (spec.name, torch.empty(spec.shape, dtype=dtype, device=self._device))
                for spec in rule.hf
            ]
        elif dtype == torch.float32 and optimizer.holds(held.name):
            found = list(united(rule, optimizer.read("model", held.name)))
        else:
            found = [(n, t.to(dtype)) for n, t in united(rule, held.tensor)]
        for name, whole in found:
            tensor = whole.contiguous()
            if rule.expert is not None:
                each = policy.arch.num_experts // experts.size
                parallel.spread(tensor, experts, rule.expert // each)
            parallel.spread(tensor, stages, self._home(rule))
            yield name, tensor

    def _home(self, rule: Rule) -> int:
        """The stage that has a tensor."""
        if rule.layer is not None:
            return self._homes[rule.layer]
        first = rule.megatron == "embedding.word_embeddings.weight"
        return 0 if first else parallel.stages().size - 1

    def export_hf(self, folder: Path, dtype: DType) -> None:
        """Write config, tokenizer and weights; see `write_hf_folder`."""
        self._held(weights_only=True)
        if self._folder is None or self.dirty:
            raise TrainError(
                "the trainer stopped in the middle of a batch, so its weights are no model to "
                "export"
            )
        tensors = self.named_tensors(dtype)
        if dist.get_rank() == 0:
            write_hf_folder(folder, self._folder, tensors, dtype)
        else:
            for _ in tensors:
                pass

    def adapter(self) -> Adapter:
        """There is none: adapters are refused."""
        raise TrainError("the Megatron backend trains no adapters; use train.backend = 'fsdp'")

    def offload(self) -> None:
        """Gradients, which no state holds, are dropped."""
        if self._policy is None or self._optimizer is None:
            return
        if not self._offload.away:
            self._optimizer.drop_gradients()
            self._optimizer.settle()
        # Exports in float32 are of the master weights.
        weights = chain(_weights_of(self._policy), self._optimizer.tensors("model"))
        moments = (moment for kind in MOMENTS for moment in self._optimizer.tensors(kind))
        frozen = chain(_weights_of(self._reference), _weights_of(self._teacher))
        self._offload.put_away(weights, chain(moments, self._optimizer.gradients(), frozen))
        give_back_cache(self._device)

    def _sizes(self) -> dict[str, int]:
        policy, optimizer = self._held()
        frozen = chain(_weights_of(self._reference), _weights_of(self._teacher))
        moments = (moment for kind in MOMENTS for moment in optimizer.tensors(kind))
        tensors: dict[str, Iterable[Tensor | None]] = {
            "parameters": _weights_of(policy),
            "master weights": optimizer.tensors("model"),
            "moments": moments,
            "gradients": optimizer.gradients(),
            "frozen models": frozen,
        }
        return {name: bytes_of_all(found, self._device) for name, found in tensors.items()}


def _weights_of(network: PolicyNetwork | None) -> Iterator[Tensor]:
    """This rank's weights of a network, where there is one."""
    for chunk in network.chunks if network is not None else ():
        yield from chunk.parameters()


def _homes(held: list[Held]) -> dict[int | None, int]:
    """The stage of each layer."""
    stages = parallel.stages()
    own = sorted({one.rule.layer for one in held if one.rule.layer is not None})
    return {layer: stage for stage, layers in enumerate(stages.gather(own)) for layer in layers}


def _check(algorithm: AlgorithmConfig, train: TrainConfig, lora: Lora | None) -> None:
    """Raises for what this backend does not do."""
    refused: dict[str, Any] = {
        "model.lora_rank": lora is not None,
        "algorithm.advantage_estimator = 'ppo'": algorithm.has_critic,
        "algorithm.ref_update_interval": algorithm.ref_update_interval is not None,
    }
    for name, asked in refused.items():
        if asked:
            raise ConfigError(
                f"{name} is not there with train.backend = 'megatron'; use 'fsdp', or leave it out"
            )
