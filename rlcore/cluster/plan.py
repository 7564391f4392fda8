"""What the actors of a run are started with: read off the configuration, before anything starts."""

from dataclasses import dataclass
from pathlib import Path

from rlcore.cluster.engine_actor import EngineSpec
from rlcore.cluster.rollout_plan import RolloutPlan
from rlcore.config import RunConfig, config_digest
from rlcore.config.engines import tensor_parallel
from rlcore.engine.sglang import DETERMINISTIC_ENV, Argument
from rlcore.slime.compat.attributes import slime_args_of
from rlcore.starting_model import model_digest, model_path
from rlcore.store.credentials import all_options
from rlcore.store.manifest import chain_state_id, sha256_hex
from rlcore.store.paths import run_prefix
from rlcore.store.run_store import RunStore
from rlcore.train.trainer import DType, Lora
from rlcore.weights.delta.server import MirrorSpec


@dataclass(frozen=True)
class FleetPlan:
    """What a fleet is started with."""

    config: RunConfig
    store: RunStore
    epoch: int
    scratch: Path
    """Local folder of this driver, removed when it ends."""

    def local(self, name: str) -> Path:
        """A folder of the run if the store is local, where others can see it, else of the
        scratch.
        """
        key = f"{run_prefix(self.config.run.id)}/{name}"
        return self.store.objects.local_path(key) or self.scratch / name

    @property
    def model_folder(self) -> Path:
        """The local folder of the starting model."""
        config = self.config
        return model_path(self.store.objects, self.store.origin, config.model, self.scratch)

    @property
    def engine_folder(self) -> Path:
        """The local folder that engines start from, and whose form their weights have."""
        own = self.config.rollout.hf_checkpoint
        return self.model_folder if own is None else Path(own)

    def start_state(self) -> str:
        """The id of the trainer's state before the first iteration."""
        config = self.config
        source = model_digest(self.store.objects, self.store.origin, config.model)
        digest = config_digest(config, "run", "model")
        return chain_state_id("start", [sha256_hex(source.encode())], digest)

    @property
    def cuda(self) -> bool:
        """Whether trainers compute on GPUs."""
        device = self.config.cluster.device
        return device == "cuda" or (device == "auto" and self.config.rollout.engine == "sglang")

    @property
    def engine_dtype(self) -> DType:
        """In which the engines hold weights."""
        return "bfloat16" if self.config.rollout.engine == "sglang" else "float32"


def engine_spec(plan: FleetPlan) -> EngineSpec:
    """What each engine is started with."""
    rollout = plan.config.rollout
    return EngineSpec(
        engine=rollout.engine,
        model_path=str(plan.engine_folder),
        log_dir=_log_dir(plan),
        dtype=plan.engine_dtype,
        context_length=rollout.context_length,
        max_running_requests=rollout.max_running_requests,
        tensor_parallel=tensor_parallel(plan.config),
        gpus=plan.config.cluster.rollout_num_gpus_per_engine,
        urls=tuple(rollout.engine_urls),
        lora=Lora.of(plan.config.model) if plan.config.weights.lora_as_adapter else None,
        random_seed=plan.config.run.seed,
        routed_experts=rollout.use_rollout_routing_replay,
        start_timeout_s=rollout.start_timeout_s,
        check_interval_s=rollout.health_check_interval_s,
        check_timeout_s=rollout.health_check_timeout_s,
        releases_memory=plan.config.offloads_rollout,
        sglang=_engine_numerics(plan.config) | plan.config.sglang,
        env=DETERMINISTIC_ENV if _engine_numerics(plan.config) else {},
        mirror=_mirror_spec(plan) if plan.config.weights.transport == "delta" else None,
    )


def _log_dir(plan: FleetPlan) -> str:
    return str(plan.local("logs") / f"epoch-{plan.epoch:04d}")


def _engine_numerics(config: RunConfig) -> dict[str, Argument]:
    """SGLang's settings that go with those of the trainer; the configuration's own come first."""
    own: dict[str, Argument] = {}
    if config.train.deterministic or config.is_on_policy_by_kernels:
        own["enable_deterministic_inference"] = True
    if config.is_on_policy_by_kernels:
        own |= {"rl_on_policy_target": "fsdp", "attention_backend": "fa3"}
    return own


def _mirror_spec(plan: FleetPlan) -> MirrorSpec:
    config = plan.config
    return MirrorSpec(
        run_id=config.run.id,
        storage_root=config.storage.root,
        storage_options=all_options(config.storage),
        folder=str(plan.local("weights")),
        file_bytes=config.weights.update_weight_buffer_size,
    )


def rollout_plan(plan: FleetPlan) -> RolloutPlan:
    """What the rollout worker is made with."""
    config = plan.config
    return RolloutPlan(
        run_id=config.run.id,
        seed=config.run.seed,
        root=config.storage.root,
        options=all_options(config.storage),
        model_folder=str(plan.model_folder),
        model=config.model,
        data=config.data,
        rollout=config.rollout.model_copy(update={"max_staleness": config.max_staleness}),
        reward=config.reward,
        filter=config.filter,
        eval=config.eval,
        num_gpus=config.cluster.rollout_num_gpus,
        slime=slime_args_of(config),
        supervised=config.run.mode == "sft",
        adapters=config.weights.lora_as_adapter,
        log_dir=_log_dir(plan),
        keep_on_for=config.train.num_iterations if config.is_fully_async else None,
    )
