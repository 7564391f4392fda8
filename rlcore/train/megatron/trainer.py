"""One rank of the Megatron trainer: the `Trainer` protocol over a model laid out on ranks.

Losses, credit, packing, metrics and checks are those of every backend (`rlcore.train.loop`); here
is how the model lies on ranks.

Invariants: torch.distributed is initialised before a trainer is made; all methods are entered by
all ranks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from rlcore.algorithms.flops import ModelShape
from rlcore.config.tree import AlgorithmConfig, MegatronTable, TrainConfig
from rlcore.conversion.sources import HfFolder, Weights
from rlcore.errors import ConfigError, TrainError
from rlcore.models.architecture import Architecture
from rlcore.models.hf_config import read_hf_config
from rlcore.models.megatron_layout import MegatronLayout, check_layout
from rlcore.train.backend import Critic, Models
from rlcore.train.base import TORCH_DTYPES, BaseTrainer
from rlcore.train.fsdp.model import current_device
from rlcore.train.fsdp.state import holds_reference
from rlcore.train.megatron import parallel, state
from rlcore.train.megatron.chunks import ChunkWriter
from rlcore.train.megatron.compilation import compile_layers
from rlcore.train.megatron.cpu import without_cuda
from rlcore.train.megatron.critic import CriticNetwork, CriticPart, TrainedCritic, with_head
from rlcore.train.megatron.held import Held, held_by
from rlcore.train.megatron.hooks import Hooked, HookedCritic, HookedTraining, Hooks
from rlcore.train.megatron.model import build_model
from rlcore.train.megatron.network import Network, PolicyNetwork
from rlcore.train.megatron.optimizer import MOMENTS, DistributedAdamW
from rlcore.train.megatron.settings import Settings
from rlcore.train.megatron.table import NO_LORA
from rlcore.train.megatron.weights import ReadTensor, load_weights, own_share, united
from rlcore.train.out_of_memory import bytes_of_all
from rlcore.train.trainer import DType, Lora, StateDigest, TrainBatch
from rlcore.train.value_head import value_head
from rlcore.weights.export import Adapter
from rlcore.weights.megatron import Rule, rules


class MegatronTrainer(BaseTrainer[PolicyNetwork, DistributedAdamW]):
    """See the protocol for what each method does."""

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
        """
        Args:
            train, algorithm, temperature, seed: see `BaseTrainer`.
            device: `cpu` or `cuda` (this process's current one).
            trust_remote_code: there is none to run: models are megatron-core's.
            lora: refused.
            megatron: settings by megatron-core's names.

        Raises:
            ConfigError: a setting that this backend does not have, or a layout that does not fit.
        """
        where = current_device(device)
        super().__init__(train, algorithm, temperature=temperature, seed=seed, device=where)
        self._settings = Settings.of(megatron or {}, train)
        self._cuts = MegatronLayout.of(megatron or {})
        if lora is not None:
            raise ConfigError(NO_LORA)
        self._hooks = Hooks(train, megatron or {})
        parallel.set_up(self._settings.layout)
        self.ranks = parallel.data_ranks()
        self._critic: TrainedCritic | None = None
        self._held_tensors: list[Held] = []
        self._homes: dict[int | None, int] = {}
        self._writers = defaultdict[bool, ChunkWriter](ChunkWriter)
        """Without and with biases of routers that training has moved."""
        self._hooks.call("custom_megatron_init_path")

    # --- state ------------------------------------------------------------------------------------

    def _load_trained(self, folder: Path) -> None:
        self._policy = self._optimizer = self._critic = None
        self._writers.clear()
        self._policy = policy = self._build(folder)
        policy.routers.replays = True
        policy.routers.watches = self._train.use_routing_replay
        if self._train.use_routing_replay and not policy.arch.num_experts:
            raise ConfigError(
                "train.use_routing_replay = true, but the model has no experts; set it to false"
            )
        self._held_tensors = list(held_by(policy.chunks, policy.arch))
        self._homes = _homes(self._held_tensors)
        stored = Weights(policy.arch, HfFolder(folder))
        self._optimizer = self._build_optimizer(
            policy, self._held_tensors, self._train, stored.read
        )
        self._optimizer.after_step = policy.routers.balance
        if self._algorithm.has_critic:
            self._critic = self._build_critic(folder)

    def _warm_up(self) -> None:
        policy, _ = self._held()
        self._make_code(policy, [m for m in (self._reference, self._teacher) if m is not None])

    def _build_optimizer(
        self, model: Network, tensors: Sequence[Held], train: TrainConfig, read: ReadTensor
    ) -> DistributedAdamW:
        """Over all weights of a model that was `read`."""
        weights = [weight for held in tensors if (weight := held.weight) is not None]
        optimizer = DistributedAdamW(model.chunks, weights, train, self._settings.copies)
        if train.precision != "float32":
            # Masters are the folder's weights, not what the precision of the model left of them.
            for held in tensors:
                if held.parameter is not None:
                    whole = own_share(held.rule, read, held.tensor)
                    optimizer.write("model", held.name, whole.to(self._device))
        return optimizer

    def _read_state(self, folder: Path) -> StateDigest:
        assert self._folder is not None
        stored = holds_reference(folder)
        self._settle_reference(stored=stored)
        own = {held.name: held.tensor for held in self._reference_tensors()}

        def take(held: Held, share: Tensor) -> None:
            if held.name in own:
                own[held.name].copy_(share)

        digest = state.load(folder, self._parts(), take if stored else None, self._folder)
        self._held()[0].routers.moved = state.holds_biases(folder)
        return digest

    def _write_state(self, folder: Path) -> None:
        writer = self._writers[self._held()[0].routers.moved]
        state.save(folder, self._parts(), self._reference_tensors(), writer)

    def digest(self) -> StateDigest:
        """Digests of what is held."""
        return state.digest(self._parts(), self._reference_tensors())

    def _parts(self) -> list[state.Part]:
        policy, optimizer = self._held()
        parts = [state.Part(self._held_tensors, optimizer, biases=policy.routers.moved)]
        if self._critic is not None:
            parts.append(CriticPart(self._critic.held, self._critic.optimizer))
        return parts

    def _reference_tensors(self) -> list[Held]:
        """Those of a reference that follows the policy."""
        following = self._following
        return [] if following is None else list(held_by(following.chunks, following.arch))

    def _build(self, folder: Path) -> PolicyNetwork:
        arch, shape, padding = _described(folder)
        chunks = self._build_chunks(arch)
        weights = Weights(arch, HfFolder(folder))
        for chunk in chunks:
            load_weights(chunk, arch, weights.read)
        return PolicyNetwork(chunks, arch, self._settings.layout, shape, padding)

    def _build_chunks(self, arch: Architecture) -> list[GPTModel]:
        """This rank's runs of layers, with weights yet to be loaded."""
        layout = self._settings.layout
        check_layout(arch, self._cuts, dist.get_world_size())
        runs = range(layout.virtual_pipeline) if layout.virtual_pipeline else (None,)
        precision, more = self._train.precision, self._settings.more
        with without_cuda():
            chunks = [build_model(arch, layout, precision, more, run).train() for run in runs]
        if self._compiles:
            compile_layers(chunks)
        return chunks

    def _build_critic(self, folder: Path) -> TrainedCritic:
        arch, shape, padding = _described(folder)
        chunks = self._build_chunks(arch.model_copy(update={"tie_word_embeddings": False}))
        head = value_head(arch.hidden_size, self._seed)
        layout = self._settings.layout
        critic = CriticNetwork(chunks, arch, layout, shape, padding, deepcopy(head))
        read = with_head(Weights(critic.arch, HfFolder(folder)).read, head)
        tensors = list(critic.held())
        for held in tensors:
            held.tensor.copy_(own_share(held.rule, read, held.tensor))
        optimizer = self._build_optimizer(critic, tensors, self._critic_train, read)
        return TrainedCritic(critic, optimizer, tensors)

    def _vocabulary(self, model: PolicyNetwork) -> int:
        return model.arch.vocab_size

    def _make_like_policy(self, reference: PolicyNetwork) -> None:
        self._held()[1].settle()
        own = held_by(reference.chunks, reference.arch)
        for old, new in zip(own, self._held_tensors, strict=True):
            old.tensor.copy_(new.tensor)

    # --- training ---------------------------------------------------------------------------------

    def _models(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> Models:
        policy, optimizer = self._held()
        hooks, iteration = self._hooks, batch.iteration
        critic = self._critic if algorithm.has_critic else None
        reference, teacher = self._reference, self._teacher if algorithm.opd_teacher_load else None
        return Models(
            HookedTraining(policy, hooks, optimizer, iteration),
            optimizer,
            self.ranks,
            critic=critic and Critic(HookedCritic(critic, hooks, iteration), critic.optimizer),
            reference=None if reference is None else Hooked(reference, hooks, "ref_"),
            teacher=None if teacher is None else Hooked(teacher, hooks, "teacher_"),
        )

    def _gradient(self) -> Iterator[Tensor]:
        return self._held()[1].collected()

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
        """Hugging Face's tensors of a rule, on every rank: from those that hold them. Biases of
        routers stay as exact as they are: they decide between experts.
        """
        policy, optimizer = self._held(weights_only=True)
        stages, experts = parallel.stages(), parallel.expert_ranks()
        if rule.is_bias_of_router:
            dtype = torch.float32
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

    def adapter(self) -> Adapter:
        """There is none: adapters are refused."""
        raise TrainError("the Megatron backend trains no adapters; use train.backend = 'fsdp'")

    def offload(self) -> None:
        """Gradients, which no state holds, are dropped; weights on their way arrive first."""
        if not self._offload.away:
            for optimizer in self._optimizers():
                optimizer.settle()
        super().offload()

    def _optimizers(self) -> Iterator[DistributedAdamW]:
        if self._optimizer is not None:
            yield self._optimizer
        if self._critic is not None:
            yield self._critic.optimizer

    def _for_export(self) -> Iterator[Tensor]:
        yield from _weights_of(self._policy)
        if self._optimizer is not None:
            # Exports in float32 are of the master weights.
            yield from self._optimizer.tensors("model")

    def _for_training(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers():
            yield from chain(*map(optimizer.tensors, MOMENTS))
        if self._critic is not None:
            yield from _weights_of(self._critic.model)
            yield from self._critic.optimizer.tensors("model")
        yield from chain(_weights_of(self._reference), _weights_of(self._teacher))

    def _zeros(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers():
            yield from optimizer.gradients()

    def _sizes(self) -> dict[str, int]:
        critic = self._critic and self._critic.model
        optimizers = list(self._optimizers())
        tensors: dict[str, Iterable[Tensor | None]] = {
            "parameters": chain(_weights_of(self._policy), _weights_of(critic)),
            "master weights": (t for o in optimizers for t in o.tensors("model")),
            "moments": (t for o in optimizers for kind in MOMENTS for t in o.tensors(kind)),
            "gradients": (t for o in optimizers for t in o.gradients()),
            "frozen models": chain(_weights_of(self._reference), _weights_of(self._teacher)),
        }
        return {name: bytes_of_all(found, self._device) for name, found in tensors.items()}


def _described(folder: Path) -> tuple[Architecture, ModelShape, int | None]:
    """What a folder says of its model: also the token that is padding, if there is one."""
    if not (config := folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} has no config.json; give a Hugging Face model folder"
        )
    told, arch = json.loads(config.read_text()), read_hf_config(folder)
    padding = told.get("pad_token_id")
    if padding is not None and padding < 0:
        # As torch's embedding counts.
        padding += arch.vocab_size
    return arch, ModelShape.of(SimpleNamespace(**told)), padding


def _weights_of(network: Network | None) -> Iterator[Tensor]:
    """This rank's weights of a network, where there is one."""
    for chunk in network.chunks if network is not None else ():
        yield from chunk.parameters()


def _homes(held: list[Held]) -> dict[int | None, int]:
    """The stage of each layer."""
    stages = parallel.stages()
    own = sorted({one.rule.layer for one in held if one.rule.layer is not None})
    return {layer: stage for stage, layers in enumerate(stages.gather(own)) for layer in layers}
