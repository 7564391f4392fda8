"""The configuration of a run: one strict tree of frozen sections.

Invariants:
- An unknown key, a wrong type, a value out of range or a contradiction is an error before anything
  starts.
- The line under each field is its help text: in `sluice config schema`, in Prefect's form and in
  the docs.
- A path is absolute or a URL once the tree is loaded (`rlcore.config.load` resolves it against its
  file).
- Fields listed in a section's `OPERATIONAL` do not change what is computed, so they are no part of
  a digest.
"""

# pydantic copies defaults, which ruff does not know of a section's base in another file.
# ruff: noqa: RUF012

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, model_validator

from rlcore.config.ahead import AGAINST_STALENESS, AHEAD, check_ahead
from rlcore.config.ahead import WITHOUT_ENGINES as WITHOUT_ENGINES
from rlcore.config.ahead import WITHOUT_TRAINER as WITHOUT_TRAINER
from rlcore.config.algorithm import AlgorithmConfig as AlgorithmConfig
from rlcore.config.data import DataConfig as DataConfig
from rlcore.config.data import EvalConfig as EvalConfig
from rlcore.config.data import EvalDataset as EvalDataset
from rlcore.config.demonstrations import check_demonstrations
from rlcore.config.engines import check_engines
from rlcore.config.evaluations import check_evaluations
from rlcore.config.model import ModelConfig as ModelConfig
from rlcore.config.on_policy import check_kernels_agree
from rlcore.config.replay import check_replay
from rlcore.config.reward import NO_REWARD
from rlcore.config.reward import JudgeConfig as JudgeConfig
from rlcore.config.reward import RewardConfig as RewardConfig
from rlcore.config.rollout import FilterConfig as FilterConfig
from rlcore.config.rollout import RolloutConfig as RolloutConfig
from rlcore.config.secrets import names_a_secret
from rlcore.config.section import FilePath as FilePath
from rlcore.config.section import FunctionPath as FunctionPath
from rlcore.config.section import MegatronTable as MegatronTable
from rlcore.config.section import PositiveInt as PositiveInt
from rlcore.config.section import Scalar as Scalar
from rlcore.config.section import Section as Section
from rlcore.config.tracking import TrackingConfig as TrackingConfig
from rlcore.config.train import TrainConfig as TrainConfig
from rlcore.config.train import check_backend
from rlcore.config.weights import WeightsConfig as WeightsConfig
from rlcore.config.weights import check_transport


class RunSection(Section):
    """Identity of the run."""

    model_config = ConfigDict(title="run")

    OPERATIONAL = frozenset({"id", "max_attempts"})

    id: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9._-]{0,79})?$")] = ""
    """Name of the run: lower-case letters, digits, '.', '_', '-'. Empty: one is made up."""
    mode: Literal[
        "sync", "async", "fully-async", "debug-rollout-only", "debug-train-only", "sft"
    ] = "sync"
    """Which stages an iteration has, and which actors the run; see docs/modes.md."""
    train_from: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9._-]{0,79})?$")] = ""
    """A run of the same root whose stored batches `debug-train-only` trains on."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds shuffling, sampling and initialisation."""
    max_attempts: PositiveInt = 3
    """How often a deployed run may crash at one iteration before it counts as failed."""

    @model_validator(mode="after")
    def _batches_have_a_source(self) -> "RunSection":
        if (self.mode == "debug-train-only") != bool(self.train_from):
            raise ValueError(
                "run.mode = 'debug-train-only' and run.train_from, the run whose batches are "
                "trained on, belong together: give both or neither"
            )
        return self


class CheckpointConfig(Section):
    """What is kept of the trained model."""

    save_interval: PositiveInt | None = None
    """Iterations between Hugging Face checkpoints; the last iteration always makes one."""
    keep_last: PositiveInt = 2
    """Checkpoints, and trainer states, kept; older ones are removed."""
    state_interval: PositiveInt = 1
    """Iterations between saved trainer states; a resume makes those between from stored batches."""


class StorageConfig(Section):
    """Where runs are kept."""

    root: FilePath = "sluice-data"
    """Folder or URL (file://, s3://, memory://) of all runs."""
    options: dict[str, Scalar] = {}
    """More arguments of the file system, such as endpoint_url; none that is a secret."""
    credentials_block: str = ""
    """Prefect block with the store's credentials: a Secret's name, or TYPE/NAME."""
    lease_ttl_s: Annotated[float, Field(ge=2)] = 120.0
    """Seconds after which a driver that shows no life loses the run."""

    @model_validator(mode="after")
    def _holds_no_secret(self) -> "StorageConfig":
        for name, value in self.options.items():
            if names_a_secret(name) or "@" in urlsplit(str(value)).netloc:
                raise ValueError(
                    f"storage.options.{name} is a secret, and a configuration is stored and shown "
                    "as it is: put it into the environment (FSSPEC_S3_KEY, FSSPEC_S3_SECRET, "
                    "AWS_...), or name a Prefect block in storage.credentials_block"
                )
        if "@" in urlsplit(self.root).netloc:
            raise ValueError(
                "storage.root holds a user or password, and a configuration is stored and shown as "
                "it is: put it into the environment (FSSPEC_S3_KEY, FSSPEC_S3_SECRET), or name a "
                "Prefect block in storage.credentials_block"
            )
        return self


class ClusterConfig(Section):
    """What the run takes of a Ray cluster."""

    ray_address: str = "auto"
    """host:port of a Ray head; `local`: a private Ray; `auto`: $RAY_ADDRESS, else a private one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainers compute."""
    actor_num_nodes: PositiveInt = 1
    """Nodes of the trainer."""
    actor_num_gpus_per_node: PositiveInt = 1
    """Trainer ranks on each node."""
    rollout_num_gpus: PositiveInt = 1
    """GPUs of all engines (on CPU: engine slots)."""
    rollout_num_gpus_per_engine: PositiveInt = 1
    """GPUs of one engine: its tensor-parallel size."""
    colocate: bool = False
    """Trainer and engines share GPUs."""
    offload_train: bool | None = None
    """The trainer's memory waits in the host's while engines generate; unset: as `colocate`."""
    offload_rollout: bool | None = None
    """Engines give weights, cache and graphs back while the trainer works; unset: as `colocate`."""

    @model_validator(mode="after")
    def _who_shares_nothing_keeps_its_memory(self) -> "ClusterConfig":
        for name in ("offload_train", "offload_rollout"):
            if getattr(self, name) and not self.colocate:
                raise ValueError(
                    f"cluster.{name} = true makes room on GPUs that are shared, but "
                    "cluster.colocate = false: set cluster.colocate = true, or remove it"
                )
        return self


class CompatConfig(Section):
    """Plugins written for other programs."""

    slime: bool = False
    """Plugins written for slime run as they are: its import names and its `args` are there."""
    args: dict[str, Scalar] = {}
    """More attributes of slime's `args`: settings of the plugins' own."""

    @model_validator(mode="after")
    def _args_have_a_use(self) -> "CompatConfig":
        if self.args and not self.slime:
            raise ValueError(
                f"compat.args.{next(iter(self.args))} is set, but compat.slime = false: set "
                "compat.slime = true, or remove it"
            )
        return self


class RunConfig(Section):
    """Everything a run is made of. What people change most comes first."""

    model_config = ConfigDict(title="config")

    run: RunSection = RunSection()
    """Identity of the run."""
    model: ModelConfig
    """The model that is trained."""
    data: DataConfig
    """The prompts to train on."""
    reward: RewardConfig
    """How responses are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are generated."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    train: TrainConfig = TrainConfig()
    """The optimizer and the trainer."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept of the trained model."""
    filter: FilterConfig = FilterConfig()
    """Which groups are trained on."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the engines."""
    storage: StorageConfig = StorageConfig()
    """Where runs are kept."""
    cluster: ClusterConfig = ClusterConfig()
    """What the run takes of a Ray cluster."""
    tracking: TrackingConfig = TrackingConfig()
    """Where metrics go beside the store and Prefect."""
    compat: CompatConfig = CompatConfig()
    """Plugins written for other programs."""
    sglang: dict[str, Scalar | list[Scalar]] = {}
    """Arguments of SGLang's server, by their own names; a list where one takes several values."""
    megatron: MegatronTable = {}
    """Layout and other settings of megatron-core, by their own names."""

    @model_validator(mode="before")
    @classmethod
    def _what_is_stored_needs_no_reward(cls, tree: Any) -> Any:
        run = tree.get("run") if isinstance(tree, dict) else None
        if isinstance(run, dict) and run.get("mode") in WITHOUT_ENGINES and "reward" not in tree:
            return tree | {"reward": {"rm_type": NO_REWARD}}
        return tree

    @model_validator(mode="before")
    @classmethod
    def _old_samples_are_weighed(cls, tree: Any) -> Any:
        run = tree.get("run") if isinstance(tree, dict) else None
        if not (isinstance(run, dict) and run.get("mode") in AHEAD):
            return tree
        algorithm = tree.get("algorithm", {})
        if not isinstance(algorithm, dict) or algorithm.get("loss_type") == "sft_loss":
            return tree
        if not AGAINST_STALENESS & algorithm.keys():
            return tree | {"algorithm": algorithm | {"use_tis": True}}
        return tree

    @model_validator(mode="after")
    def _rollouts_ahead_agree(self) -> "RunConfig":
        check_ahead(self)
        check_transport(self)
        if self.world_size % self.train.context_parallel_size:
            raise ValueError(
                f"train.context_parallel_size = {self.train.context_parallel_size} does not divide "
                f"the trainer's {self.world_size} ranks (cluster.actor_num_nodes x "
                "cluster.actor_num_gpus_per_node)"
            )
        return self

    @model_validator(mode="after")
    def _adapters_agree(self) -> "RunConfig":
        interval = self.algorithm.ref_update_interval
        if self.model.lora_rank is not None and interval is not None:
            raise ValueError(
                f"algorithm.ref_update_interval = {interval} moves the reference, which with "
                "model.lora_rank is always the starting model; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _demonstrations_agree(self) -> "RunConfig":
        check_demonstrations(self)
        return self

    @model_validator(mode="after")
    def _batches_add_up(self) -> "RunConfig":
        rollout, train = self.rollout, self.train
        made = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        used = train.global_batch_size * train.num_steps_per_rollout
        if made != used:
            size, rest = divmod(made, train.num_steps_per_rollout)
            raise ValueError(
                "rollout.rollout_batch_size x rollout.n_samples_per_prompt = "
                f"{rollout.rollout_batch_size} x {rollout.n_samples_per_prompt} = {made}, but "
                "train.global_batch_size x train.num_steps_per_rollout = "
                f"{train.global_batch_size} x {train.num_steps_per_rollout} = {used}; they must be "
                + (
                    f"equal, for which {made} must be a multiple of train.num_steps_per_rollout"
                    if rest
                    else f"equal, as with train.global_batch_size = {size}"
                )
            )
        return self

    @model_validator(mode="after")
    def _prompts_have_room(self) -> "RunConfig":
        whole, response = self.rollout.context_length, self.rollout.max_response_len
        if self.generates and whole is not None and whole <= response:
            raise ValueError(
                f"rollout.context_length = {whole} leaves no room for a prompt beside "
                f"rollout.max_response_len = {response}"
            )
        return self

    @model_validator(mode="after")
    def _over_sampling_has_a_use(self) -> "RunConfig":
        rollout, chosen = self.rollout, self.filter.dynamic_sampling_filter_path
        begun, want = rollout.over_sampling_batch_size, rollout.rollout_batch_size
        refilled = begun is not None and chosen is not None
        left_over = (begun or 0) > want or refilled or rollout.custom_rollout_function_path
        needs = {
            "partial_rollout = true": rollout.partial_rollout,
            "buffer_filter_path is set": rollout.buffer_filter_path is not None,
        }
        said = next((text for text, asked in needs.items() if asked), None)
        if said is not None and not left_over:
            raise ValueError(
                f"rollout.{said}, but nothing is ever left over: set "
                f"rollout.over_sampling_batch_size above rollout.rollout_batch_size = {want}"
            )
        if chosen == "nonzero_std_with_fallback" and (begun or 0) <= want:
            raise ValueError(
                "filter.dynamic_sampling_filter_path = 'nonzero_std_with_fallback' drops only what "
                "over-sampling can replace: "
                + (
                    "run.mode = 'fully-async' has none; use 'nonzero_std'"
                    if self.is_fully_async
                    else "set rollout.over_sampling_batch_size above "
                    f"rollout.rollout_batch_size = {want}, or use 'nonzero_std'"
                )
            )
        return self

    @model_validator(mode="after")
    def _a_filter_can_keep(self) -> "RunConfig":
        rollout, chosen = self.rollout, self.filter.dynamic_sampling_filter_path
        # A function may make several samples of one execution, each with its own reward.
        own = rollout.custom_generate_function_path or rollout.custom_rollout_function_path
        own = own or self.data.generate_function_key
        spread = chosen in ("nonzero_std", "nonzero_std_with_fallback")
        if spread and rollout.n_samples_per_prompt == 1 and not own:
            raise ValueError(
                f"filter.dynamic_sampling_filter_path = {chosen!r} drops groups of equal rewards, "
                "which with rollout.n_samples_per_prompt = 1 is every group; use 2 or more, or "
                "remove the filter"
            )
        return self

    @model_validator(mode="after")
    def _templates_are_applied(self) -> "RunConfig":
        data, rollout, sets = self.data, self.rollout, self.eval.datasets
        applied = data.apply_chat_template or any(one.apply_chat_template for one in sets)
        # Functions of one's own may apply the template; conversations that are learned have it.
        own = (
            rollout.custom_generate_function_path,
            rollout.custom_rollout_function_path,
            rollout.data_source_path,
            data.generate_function_key,
            self.eval.eval_function_path,
            *(one.custom_generate_function_path for one in sets),
            self.run.mode == "sft",
        )
        if data.apply_chat_template_kwargs and not (applied or any(own)):
            raise ValueError(
                "data.apply_chat_template_kwargs is set, but no chat template is applied: set "
                "data.apply_chat_template = true, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _what_is_trained_was_sampled(self) -> "RunConfig":
        if self.rollout.temperature == 0 and self.trains:
            raise ValueError(
                "rollout.temperature = 0, by which the trainer divides its logits; use a "
                "temperature above 0, or run.mode = 'debug-rollout-only'"
            )
        return self

    @model_validator(mode="after")
    def _groups_have_a_baseline(self) -> "RunConfig":
        if self.rollout.n_samples_per_prompt == 1 and self.algorithm.group_baseline:
            raise ValueError(
                "rollout.n_samples_per_prompt = 1 with algorithm.advantage_estimator = "
                f"{self.algorithm.advantage_estimator!r}: a group of one has no baseline and every "
                "advantage is 0; use 2 or more, or algorithm.rewards_normalization = false"
            )
        return self

    @model_validator(mode="after")
    def _there_is_one_teacher(self) -> "RunConfig":
        folder, url = self.algorithm.opd_teacher_load, self.rollout.teacher_url
        if bool(folder) + bool(url) != self.algorithm.use_opd:
            raise ValueError(
                "algorithm.use_opd = true and one teacher belong together: give "
                "algorithm.opd_teacher_load, a folder for the trainer to hold, or "
                "rollout.teacher_url, a server; or none of the three"
            )
        if url is not None and self.rollout.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature = {self.rollout.temperature}, but the server of "
                "rollout.teacher_url scores at 1; set 1, or use algorithm.opd_teacher_load"
            )
        return self

    @model_validator(mode="after")
    def _policies_agree(self) -> "RunConfig":
        algorithm, steps = self.algorithm, self.train.num_steps_per_rollout
        late = self.rollout.partial_rollout or self.is_async
        if algorithm.true_on_policy_mode and (steps > 1 or late):
            other = (
                f"run.mode = {self.run.mode!r}"
                if self.is_async
                else "rollout.partial_rollout = true"
            )
            if steps > 1:
                other = f"train.num_steps_per_rollout = {steps}"
            raise ValueError(
                "algorithm.true_on_policy_mode = true, but the policy that is trained is not the "
                f"one that sampled with {other}"
            )
        if self.is_on_policy_by_kernels:
            check_kernels_agree(self)
        if algorithm.use_opsm and steps == 1 and not algorithm.use_rollout_logprobs:
            raise ValueError(
                "algorithm.use_opsm = true has no effect with train.num_steps_per_rollout = 1, "
                "where the old policy is the one that is trained; set "
                "algorithm.use_rollout_logprobs = true, or more steps"
            )
        return self

    @model_validator(mode="after")
    def _the_policy_is_trained(self) -> "RunConfig":
        alone, whole = self.algorithm.num_critic_only_steps, self.train.num_iterations
        if self.trains and alone >= whole:
            raise ValueError(
                f"algorithm.num_critic_only_steps = {alone} with train.num_iterations = {whole}: "
                "the policy would never be trained; lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _routing_is_replayed(self) -> "RunConfig":
        check_replay(self)
        return self

    @model_validator(mode="after")
    def _evaluations_agree(self) -> "RunConfig":
        check_evaluations(self)
        return self

    @model_validator(mode="after")
    def _backends_exist(self) -> "RunConfig":
        check_backend(self)
        check_engines(self)
        return self

    @property
    def trains(self) -> bool:
        """Whether the run has a trainer."""
        return self.run.mode not in WITHOUT_TRAINER

    @property
    def generates(self) -> bool:
        """Whether the run has engines."""
        return self.run.mode not in WITHOUT_ENGINES

    @property
    def is_async(self) -> bool:
        """Whether the next rollouts are made while one is trained on."""
        return self.run.mode in AHEAD

    @property
    def is_fully_async(self) -> bool:
        """Whether generation goes on across iterations, and weights change under way."""
        return self.run.mode == "fully-async"

    @property
    def lag(self) -> int:
        """Iterations that the policy of a rollout may lie behind the one that is trained on it."""
        if not self.is_async:
            return 0
        most = self.rollout.async_buffer_size + self.rollout.update_weights_interval - 1
        # A group may be begun in one iteration, before the weight sync, and end in a later one.
        return most + 1 if self.is_fully_async else most

    def policy_version(self, iteration: int) -> int:
        """The policy that makes the rollout of an iteration: the model after so many iterations.

        In the mode `async` it is begun `async_buffer_size` iterations before, by what the last
        weight sync until then has given the engines; in the mode `fully-async` this is the newest
        of its policies. It follows from these settings, and not from time.
        """
        if not self.trains:
            return 0
        if not self.is_async:
            return iteration
        every = self.rollout.update_weights_interval
        if self.is_fully_async:
            return iteration // every * every
        return max(0, iteration - self.rollout.async_buffer_size) // every * every

    @property
    def max_staleness(self) -> int | None:
        """Most iterations that the policy of any token may lie behind; None: there is no bound."""
        if self.rollout.max_staleness is None and self.is_async:
            return self.lag
        return self.rollout.max_staleness

    @property
    def states_kept(self) -> int:
        """Trainer states that are kept: with them the older policies that a resume needs."""
        behind = self.lag // self.checkpoint.state_interval + 2 if self.lag else 0
        return max(self.checkpoint.keep_last, behind)

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        return (
            len(self.rollout.engine_urls)
            or self.rollout.num_engines
            or self.cluster.rollout_num_gpus // self.cluster.rollout_num_gpus_per_engine
        )

    @property
    def is_on_policy_by_kernels(self) -> bool:
        """Whether the trainer computes as SGLang does, operation by operation."""
        return self.algorithm.true_on_policy_mode and self.rollout.engine == "sglang"

    @property
    def world_size(self) -> int:
        """Trainer ranks of the run."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run: the length of the learning-rate schedule."""
        return self.train.num_iterations * self.train.num_steps_per_rollout

    @property
    def offloads_train(self) -> bool:
        """Whether the trainer leaves the GPUs while engines generate."""
        chosen = self.cluster.offload_train
        return self._takes_turns and (chosen is None or chosen)

    @property
    def offloads_rollout(self) -> bool:
        """Whether engines give their memory back while the trainer works."""
        chosen = self.cluster.offload_rollout
        return self._takes_turns and (chosen is None or chosen)

    @property
    def _takes_turns(self) -> bool:
        return self.cluster.colocate and self.trains and self.generates

    @property
    def canary_tolerance(self) -> float:
        """Largest mean absolute log-prob difference between engine and trainer after a sync."""
        if self.weights.canary_tolerance is not None:
            return self.weights.canary_tolerance
        exact = self.rollout.engine == "embedded" and self.train.precision == "float32"
        return 1e-4 if exact else 0.3

    def due(self, interval: int | None, iteration: int, *, last: bool) -> bool:
        """Whether something done every `interval` iterations is due after this one."""
        if last and iteration + 1 == self.train.num_iterations:
            return True
        return interval is not None and (iteration + 1) % interval == 0
