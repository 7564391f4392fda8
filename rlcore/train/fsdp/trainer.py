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
from rlcore.train.base import (
    TORCH_DTYPES,
    BaseTrainer,
    check_teacher_folder,
    check_vocabularies,
)
from rlcore.train.custom import Functions
from rlcore.train.fsdp import state
from rlcore.train.fsdp.compilation import compile_layers, make_code
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
from rlcore.train.fsdp.shards import ShardWriter
from rlcore.train.loop import BatchLoop, LoopSettings
from rlcore.train.offload import give_back_cache
from rlcore.train.out_of_memory import bytes_of_all
from rlcore.train.ranks import Ranks
from rlcore.train.rates import learning_rate
from rlcore.train.trainer import (
    DType,
    Lora,
    StateDigest,
    TrainBatch,
)
from rlcore.weights.experts import by_expert
from rlcore.weights.export import Adapter, write_hf_folder
from rlcore.weights.names import checkpoint_names, stored_names


class FsdpTrainer(BaseTrainer):
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
            train, algorithm: the settings.
            temperature: of the rollout.
            seed: of the run.
            device: `cpu` or `cuda` (this process's current one).
            trust_remote_code: run code that comes with a model.
            lora: adapters in place of the weights.
            as_sglang: compute what SGLang does, operation by operation.
        """
        super().__init__(train, algorithm, current_device(device))
        self._temperature = temperature
        self._seed = seed
        self._trust_remote_code = trust_remote_code
        self._lora = lora
        self._as_sglang = as_sglang
        self._mesh = init_device_mesh(device, (dist.get_world_size(),))
        self._context: Context | None = None
        self.ranks = Ranks()
        """That a batch is dealt out to."""
        if train.context_parallel_size > 1:
            self._context, self.ranks = Context.of(train.context_parallel_size)
        self._folder: Path | None = None
        self._names: dict[str, str] = {}
        self._fixed: dict[str, str] = {}
        self.images: ImageProcessor | None = None
        """Of the model that is held; None where it takes no images."""
        self._policy: Policy | None = None
        self._adapters: Adapters | None = None
        self._reference: Policy | None = None
        self._reference_moved = False
        self._teacher: Policy | None = None
        self._optimizer: ShardedAdamW | None = None
        self._critic: TrainedCritic | None = None
        self._writer = ShardWriter()

    # --- state ------------------------------------------------------------------------------------

    def load(self, model_folder: Path, state_id: str) -> None:
        """Build policy, optimizer and, where a divergence is asked for, the frozen reference,
        from a Hugging Face folder.
        """
        self.loaded, self.dirty = None, True
        self._offload.take_back(weights_only=False)
        self._policy = self._adapters = self._optimizer = self._critic = None
        self._policy = self._build(model_folder, trained=True)
        self._policy.routing.replays = True
        self._policy.routing.watches = self._train.use_routing_replay
        if self._train.use_routing_replay and not self._policy.routing.has_experts:
            raise ConfigError(
                "train.use_routing_replay = true, but the model has no experts; set it to false"
            )
        own = self._reference is None or self._reference_moved
        if self._algorithm.needs_reference and self._adapters is None and own:
            self._build_reference(model_folder)
        if self._algorithm.opd_teacher_load and self._teacher is None:
            self._teacher = self._build_teacher(
                self._policy, Path(self._algorithm.opd_teacher_load)
            )
        self._optimizer = ShardedAdamW(list(self._policy.trained()), self._train)
        if self._algorithm.has_critic:
            self._critic = self._build_critic(model_folder)
        self._writer = ShardWriter()
        self._folder = model_folder
        self._names = checkpoint_names([name for name, _ in self._policy.weights()], model_folder)
        stored = stored_names(model_folder)
        fixed = checkpoint_names([name for name, _ in self._policy.fixed()], model_folder)
        self._fixed = {own: name for own, name in fixed.items() if name in stored}
        self.images = None
        if takes_images(model_folder):
            self.images = ImageProcessor(model_folder, trust_remote_code=self._trust_remote_code)
        if self._compiles:
            self._make_code()
        torch.manual_seed(self._seed)
        self.loaded, self.dirty = state_id, False

    def _make_code(self) -> None:
        """Have torch make the code of a step before there is one: engines start meanwhile."""
        policy, optimizer = self._held()
        frozen = [self._reference_of(policy), self._teacher]
        make_code(
            policy,
            [Scorer(model) for model in frozen if model is not None],
            self._device,
            max_tokens=self._train.max_tokens,
            temperature=self._temperature,
            with_entropy=self._algorithm.entropy_coef != 0,
        )
        optimizer.drop_gradients()

    def load_state(self, folder: Path, state_id: str) -> StateDigest:
        """Read a saved state in place; `load` must have built the model before."""
        policy, optimizer = self._held()
        self.loaded, self.dirty = None, True
        target = self._reference_target(folder, policy)
        digest = state.load(folder, policy, optimizer, self._critic, target)
        self.loaded, self.dirty = state_id, False
        return digest

    def save_state(self, folder: Path) -> None:
        """Write this rank's share of the state that is held."""
        policy, optimizer = self._held()
        if self.dirty:
            raise TrainError(
                "the trainer stopped in the middle of a batch, so it holds no state to save"
            )
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
        """Whether layers are compiled: what is compiled may differ in its last bits."""
        plain = self._as_sglang or self._train.deterministic
        return self._device.type == "cuda" and self._train.torch_compile and not plain

    def _build_reference(self, folder: Path) -> None:
        self._reference = None
        self._reference = self._build(folder)
        self._reference_moved = False

    def _reference_of(self, policy: Policy) -> Policy | WithoutAdapters | None:
        """What answers for the reference, where there is one."""
        if self._adapters is None or not self._algorithm.needs_reference:
            return self._reference
        return WithoutAdapters(policy, self._adapters)

    def _reference_weights(self) -> dict[str, Tensor] | None:
        """Those of a reference that follows the policy: a part of the state."""
        if self._algorithm.ref_update_interval is None or self._reference is None:
            return None
        return {name: p.detach() for name, p in self._reference.weights()}

    def _reference_target(self, folder: Path, policy: Policy) -> dict[str, Tensor] | None:
        """Where the reference of a saved state is to go; None: it has none."""
        if not state.holds_reference(folder):
            # A forefather's, whose reference stayed the starting model.
            if self._reference_moved and self._folder is not None:
                self._build_reference(self._folder)
            return None
        own = self._reference_weights()
        if own is None:
            # Read all the same, since the state is known by all that it holds.
            return {name: torch.empty_like(p.detach()) for name, p in policy.weights()}
        self._reference_moved = True
        return own

    @torch.no_grad()
    def _follow(self, iteration: int) -> None:
        """Have the reference become the policy after an iteration where that is due."""
        interval = self._algorithm.ref_update_interval
        if interval is None or self._reference is None or (iteration + 1) % interval:
            return
        policy, _ = self._held()
        self._reference_moved = True
        for (_, old), (_, new) in zip(self._reference.weights(), policy.weights(), strict=True):
            state.held(old.detach()).copy_(state.held(new.detach()))

    def _build_teacher(self, policy: Policy, folder: Path) -> Policy:
        check_teacher_folder(folder)
        teacher = self._build(folder)
        ours, theirs = (m.lm.get_input_embeddings().weight.shape[0] for m in (policy, teacher))
        check_vocabularies(folder, ours, theirs)
        return teacher

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

    @property
    def _critic_train(self) -> TrainConfig:
        """The optimizer's settings with the critic's learning rate."""
        rate = self._algorithm.critic_lr
        return self._train if rate is None else self._train.model_copy(update={"lr": rate})

    def _held(self, *, weights_only: bool = False) -> tuple[Policy, ShardedAdamW]:
        if self._policy is None or self._optimizer is None:
            raise TrainError("the trainer holds no model yet; call load first")
        self._offload.check(weights_only=weights_only)
        return self._policy, self._optimizer

    # --- training ---------------------------------------------------------------------------------

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
        gradient = [part.to("cpu", copy=True).flatten() for part in optimizer.gradients()]
        optimizer.drop_gradients()
        return metrics, gradient

    def _loop(self, algorithm: AlgorithmConfig, batch: TrainBatch) -> BatchLoop:
        policy, optimizer = self._held()
        total = self._train.num_iterations * self._train.num_steps_per_rollout
        settings = LoopSettings(
            algorithm=algorithm,
            temperature=self._temperature,
            clip_grad=self._train.clip_grad,
            lr=lambda step: learning_rate(step, total, self._train),
            critic_lr=lambda step: learning_rate(step, total, self._critic_train),
            device=self._device,
        )
        critic = self._critic if algorithm.has_critic else None
        reference = self._reference_of(policy)
        teacher = self._teacher if algorithm.opd_teacher_load else None
        models = Models(
            Passes(policy),
            optimizer,
            self.ranks,
            critic=None if critic is None else Critic(CriticPasses(critic.model), critic.optimizer),
            reference=None if reference is None else Scorer(reference),
            teacher=None if teacher is None else Scorer(teacher),
        )
        # Before anything is begun: a function that cannot be loaded leaves all as it is.
        return BatchLoop(models, settings, batch, Functions(algorithm, self._temperature))

    def _stepped(self) -> ShardedAdamW:
        return self._held()[1]

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

    def export_hf(self, folder: Path, dtype: DType) -> None:
        """Write config, tokenizer and weights, and an adapter by itself; see `write_hf_folder`."""
        self._held(weights_only=True)
        if self._folder is None or self.dirty:
            raise TrainError(
                "the trainer stopped in the middle of a batch, so its weights are no model to "
                "export"
            )
        adapter = None if self._adapters is None else self.adapter()
        tensors = self.named_tensors(dtype)
        if dist.get_rank() == 0:
            write_hf_folder(folder, self._folder, tensors, dtype, adapter)
        else:
            for _ in tensors:
                pass

    @torch.no_grad()
    def adapter(self) -> Adapter:
        """What is trained in place of the weights, whole; float32."""
        self._held()
        if self._adapters is None:
            raise TrainError("the trainer trains the model itself and has no adapter")
        tensors = {name: whole.cpu() for name, whole in self._adapters.named_tensors()}
        return Adapter(self._adapters.config(str(self._folder)), tensors)

    # --- memory -----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Gradients, which no state holds, are dropped."""
        if self._policy is None or self._optimizer is None:
            return
        self._optimizer.drop_gradients()
        if self._critic is not None:
            self._critic.optimizer.drop_gradients()
        self._offload.put_away(self._policy.parameters(), self._beside_weights())
        give_back_cache(self._device)

    def _beside_weights(self) -> Iterator[Tensor]:
        """All large tensors but the policy's weights."""
        critic = self._critic
        for optimizer in (self._optimizer, critic and critic.optimizer):
            if optimizer is not None:
                yield from (moment for _, moment in optimizer.moments())
        for model in (critic and critic.model, self._reference, self._teacher):
            if model is not None:
                yield from model.parameters()

    def _sizes(self) -> dict[str, int]:
        """Bytes of this rank's shares of all that stays from batch to batch, and of gradients."""
        policy, optimizer = self._policy, self._optimizer
        critic, frozen = self._critic, (self._reference, self._teacher)
        learned = [model for model in (policy, critic and critic.model) if model is not None]
        optimizers = [o for o in (optimizer, critic and critic.optimizer) if o is not None]
        weights = [p for model in learned for p in model.parameters()]
        tensors: dict[str, Iterable[Tensor | None]] = {
            "parameters": weights,
            "moments": (moment for o in optimizers for _, moment in o.moments()),
            "gradients": (p.grad for p in weights),
            "frozen models": (p for model in frozen if model for p in model.parameters()),
        }
        return {name: bytes_of_all(found, self._device) for name, found in tensors.items()}
