"""One rank of the FSDP2 trainer: the `Trainer` protocol over a policy and its optimizer.

Invariants: torch.distributed is initialised before a trainer is made; all methods are entered by
all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import ConfigError, TrainError
from rlcore.images.model import blocks
from rlcore.images.processor import ImageProcessor, takes_images
from rlcore.train.backend import Critic, Models
from rlcore.train.base import TORCH_DTYPES, BaseTrainer
from rlcore.train.fsdp import state
from rlcore.train.fsdp.compilation import compile_layers
from rlcore.train.fsdp.context import Context
from rlcore.train.fsdp.critic import TrainedCritic, load_critic
from rlcore.train.fsdp.lora import Adapters, WithoutAdapters
from rlcore.train.fsdp.model import (
    Policy,
    current_device,
    load_policy,
    shard,
)
from rlcore.train.fsdp.on_policy import compute_as_sglang
from rlcore.train.fsdp.optimizer import ShardedAdamW
from rlcore.train.fsdp.passes import CriticPasses, Passes, Scorer
from rlcore.train.out_of_memory import bytes_of_all
from rlcore.train.ranks import Ranks
from rlcore.train.trainer import (
    DType,
    Lora,
    StateDigest,
    TrainBatch,
)
from rlcore.weights.experts import by_expert
from rlcore.weights.export import Adapter
from rlcore.weights.names import checkpoint_names, stored_names


class FsdpTrainer(BaseTrainer[Policy, ShardedAdamW]):
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
        as_sglang: bool = False,
    ) -> None:
        """
        Args:
            train, algorithm, temperature, seed: see `BaseTrainer`.
            device: `cpu` or `cuda` (this process's current one).
            trust_remote_code: run code that comes with a model.
            lora: adapters in place of the weights.
            as_sglang: compute what SGLang does, operation by operation.
        """
        where = current_device(device)
        super().__init__(train, algorithm, temperature=temperature, seed=seed, device=where)
        self._trust_remote_code = trust_remote_code
        self._lora = lora
        self._as_sglang = as_sglang
        self._mesh = init_device_mesh(device, (dist.get_world_size(),))
        self._context: Context | None = None
        self.ranks = Ranks()
        if train.context_parallel_size > 1:
            self._context, self.ranks = Context.of(train.context_parallel_size)
        self._names: dict[str, str] = {}
        self._fixed: dict[str, str] = {}
        self._adapters: Adapters | None = None
        self._critic: TrainedCritic | None = None

    # --- state ------------------------------------------------------------------------------------

    def _load_trained(self, folder: Path) -> None:
        self._policy = self._adapters = self._optimizer = self._critic = None
        self._policy = self._build(folder, trained=True)
        self._policy.routing.replays = True
        self._policy.routing.watches = self._train.use_routing_replay
        if self._train.use_routing_replay and not self._policy.routing.has_experts:
            raise ConfigError(
                "train.use_routing_replay = true, but the model has no experts; set it to false"
            )
        self._optimizer = ShardedAdamW(list(self._policy.trained()), self._train)
        if self._algorithm.has_critic:
            self._critic = self._build_critic(folder)
        self._names = checkpoint_names([name for name, _ in self._policy.weights()], folder)
        stored = stored_names(folder)
        fixed = checkpoint_names([name for name, _ in self._policy.fixed()], folder)
        self._fixed = {own: name for own, name in fixed.items() if name in stored}
        self.images = None
        if takes_images(folder):
            self.images = ImageProcessor(folder, trust_remote_code=self._trust_remote_code)

    def _warm_up(self) -> None:
        policy, _ = self._held()
        frozen = [self._reference_of(policy), self._teacher]
        self._make_code(
            self._passes(policy), [Scorer(model) for model in frozen if model is not None]
        )

    def _read_state(self, folder: Path) -> StateDigest:
        policy, optimizer = self._held()
        stored = state.holds_reference(folder)
        self._settle_reference(stored=stored)
        target = self._reference_weights() if stored else None
        if stored and target is None:
            # Read all the same, since the state is known by all that it holds.
            target = {name: torch.empty_like(p.detach()) for name, p in policy.weights()}
        return state.load(folder, policy, optimizer, self._critic, target)

    def _write_state(self, folder: Path) -> None:
        policy, optimizer = self._held()
        state.save(folder, policy, optimizer, self._critic, self._reference_weights(), self._writer)

    def digest(self) -> StateDigest:
        """Digests of what is held."""
        return state.digest(*self._held(), self._critic, self._reference_weights())

    def _build(self, folder: Path, *, trained: bool = False) -> Policy:
        """A model, sharded; frozen, or to be trained, itself or adapters in it."""
        policy = load_policy(
            folder,
            trust_remote_code=self._trust_remote_code,
            checkpointing=trained and self._train.gradient_checkpointing,
            context=self._context,
        )
        if self._as_sglang:
            compute_as_sglang(policy.lm, cuda=self._device.type == "cuda")
            policy.as_sglang = True
        if not trained:
            policy.requires_grad_(False)
        elif self._lora is not None:
            self._adapters = Adapters(policy, self._lora, self._seed)
        if self._compiles:
            compile_layers(policy)
        shard(policy, blocks(policy.lm.base_model), self._mesh, self._train.precision)
        return policy

    @property
    def _compiles(self) -> bool:
        return super()._compiles and not self._as_sglang

    def _reference_of(self, policy: Policy) -> Policy | WithoutAdapters | None:
        """What answers for the reference, where there is one."""
        if self._adapters is None or not self._algorithm.needs_reference:
            return self._reference
        return WithoutAdapters(policy, self._adapters)

    def _reference_weights(self) -> dict[str, Tensor] | None:
        """Those of a reference that follows the policy."""
        if (following := self._following) is None:
            return None
        return {name: p.detach() for name, p in following.weights()}

    def _vocabulary(self, model: Policy) -> int:
        return int(model.lm.get_input_embeddings().weight.shape[0])

    def _make_like_policy(self, reference: Policy) -> None:
        policy, _ = self._held()
        for (_, old), (_, new) in zip(reference.weights(), policy.weights(), strict=True):
            state.held(old.detach()).copy_(state.held(new.detach()))

    def _build_critic(self, folder: Path) -> TrainedCritic:
        critic = load_critic(
            folder,
            self._seed,
            trust_remote_code=self._trust_remote_code,
            checkpointing=self._train.gradient_checkpointing,
            context=self._context,
        )
        shard(critic, blocks(critic.body), self._mesh, self._train.precision)
        return TrainedCritic(critic, ShardedAdamW(list(critic.weights()), self._critic_train))

    # --- training ---------------------------------------------------------------------------------

    def _models(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> Models:
        policy, optimizer = self._held()
        critic = self._critic if algorithm.has_critic else None
        reference = self._reference_of(policy)
        teacher = self._teacher if algorithm.opd_teacher_load else None
        return Models(
            self._passes(policy),
            optimizer,
            self.ranks,
            critic=None if critic is None else Critic(CriticPasses(critic.model), critic.optimizer),
            reference=None if reference is None else Scorer(reference),
            teacher=None if teacher is None else Scorer(teacher),
        )

    def _passes(self, policy: Policy) -> Passes:
        # Alone a rank holds all weights anyway, and gathering them is a copy in bfloat16.
        alone = self._mesh.size() == 1 and self._train.precision == "bfloat16"
        return Passes(policy, keeps_gathered=alone and self._lora is None)

    def _gradient(self) -> Iterator[Tensor]:
        return self._held()[1].gradients()

    def _scores(self) -> Scorer:
        return Scorer(self._held(weights_only=True)[0])

    # --- weights ----------------------------------------------------------------------------------

    @torch.no_grad()
    def named_tensors(self, dtype: DType, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """Every weight once, whole, on a device, by its name in the model's folder; tied ones under
        the embedding's.
        """
        policy, _ = self._held(weights_only=True)
        plain = ((name, state.full(p.detach())) for name, p in policy.weights())
        for name, whole in plain if self._adapters is None else self._adapters.merged():
            weight = whole.to(device=device, dtype=TORCH_DTYPES[dtype])
            yield from by_expert(self._names[name], weight)
        for name, tensor in policy.fixed():
            if name in self._fixed:
                # As exact as it came: it decides between experts.
                yield self._fixed[name], tensor.to(device)

    @property
    def _trains_adapter(self) -> bool:
        return self._adapters is not None

    @torch.no_grad()
    def adapter(self) -> Adapter:
        """What is trained in place of the weights, whole; float32."""
        self._held()
        if self._adapters is None:
            raise TrainError("the trainer trains the model itself and has no adapter")
        tensors = {name: whole.cpu() for name, whole in self._adapters.named_tensors()}
        return Adapter(self._adapters.config(str(self._folder)), tensors)

    # --- memory -----------------------------------------------------------------------------------

    def _optimizers(self) -> Iterator[ShardedAdamW]:
        if self._optimizer is not None:
            yield self._optimizer
        if self._critic is not None:
            yield self._critic.optimizer

    def _for_export(self) -> Iterator[Tensor]:
        if self._policy is not None:
            yield from self._policy.parameters()

    def _for_training(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers():
            yield from (moment for _, moment in optimizer.moments())
        for model in (self._critic and self._critic.model, self._reference, self._teacher):
            if model is not None:
                yield from model.parameters()

    def _sizes(self) -> dict[str, int]:
        critic, frozen = self._critic, (self._reference, self._teacher)
        learned = [model for model in (self._policy, critic and critic.model) if model is not None]
        weights = [p for model in learned for p in model.parameters()]
        tensors: dict[str, Iterable[Tensor | None]] = {
            "parameters": weights,
            "moments": (moment for o in self._optimizers() for _, moment in o.moments()),
            "gradients": (p.grad for p in weights),
            "frozen models": (p for model in frozen if model for p in model.parameters()),
        }
        return {name: bytes_of_all(found, self._device) for name, found in tensors.items()}
