"""The section `train`: the optimizer and the trainer."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from rlcore.config.section import FunctionPath, PositiveInt, Section

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig


class TrainConfig(Section):
    """The optimizer and the trainer."""

    OPERATIONAL = frozenset({"max_tokens_per_gpu", "deadline_s"})

    num_iterations: PositiveInt = 100
    """Iterations of the run."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from 0."""
    lr_min: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that linear and cosine end at."""
    global_batch_size: PositiveInt = 256
    """Samples an optimizer step."""
    num_steps_per_rollout: PositiveInt = 1
    """Optimizer steps an iteration."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first-moment decay."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """AdamW's second-moment decay."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    backend: Literal["fsdp", "megatron"] = "fsdp"
    """`fsdp` trains Hugging Face models as they are; `megatron` lays them out by megatron-core."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; the master weights stay float32."""
    max_tokens_per_gpu: PositiveInt = 8192
    """Most tokens of a packed micro-batch on one rank."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of each micro-batch, for sequences too long for one."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward to save memory."""
    torch_compile: bool = True
    """On a GPU, fuse the work between matrix products; takes about a minute at the start."""
    optimizer_cpu_offload: bool = False
    """Keep AdamW's moments in the CPU's memory, and take its steps there."""
    custom_megatron_init_path: FunctionPath | None = None
    """With `megatron`: a function `(args)`, called when a rank's model is laid out."""
    custom_megatron_before_log_prob_hook_path: FunctionPath | None = None
    """With `megatron`: `(args, model, store_prefix)`, called before log-probs of a batch."""
    custom_megatron_before_train_step_hook_path: FunctionPath | None = None
    """With `megatron`: `(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)`."""
    use_routing_replay: bool = False
    """Train each token through the experts that were chosen when its old log-prob was computed."""
    deterministic: bool = False
    """On GPUs: kernels of trainer and SGLang that give the same bits each time, and are slower."""
    deadline_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after which a training step counts as hung."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a packed micro-batch, over the ranks that share it."""
        return self.max_tokens_per_gpu * self.context_parallel_size

    @model_validator(mode="after")
    def _schedule_falls(self) -> "TrainConfig":
        if self.lr_schedule == "constant":
            if self.lr_min:
                raise ValueError(
                    f"train.lr_min = {self.lr_min} is where a schedule ends, and "
                    "train.lr_schedule = 'constant' has no end; use 'linear' or 'cosine', or "
                    "leave train.lr_min at 0.0"
                )
            return self
        if self.lr_min > self.lr:
            raise ValueError(
                f"train.lr_min = {self.lr_min} is above train.lr = {self.lr}, "
                f"but train.lr_schedule = {self.lr_schedule!r} ends at train.lr_min"
            )
        return self


def check_backend(config: "RunConfig") -> None:
    """Settings of a backend are there for the one that trains."""
    if config.train.backend != "megatron" and config.megatron:
        raise ValueError(
            f"megatron.{next(iter(config.megatron))} is set but train.backend = "
            f"{config.train.backend!r}; set train.backend = 'megatron' or remove it"
        )
    hooks = {name: value for name, value in config.train if name.startswith("custom_megatron_")}
    hook = next((name for name, value in hooks.items() if value is not None), None)
    if config.train.backend != "megatron" and hook is not None:
        raise ValueError(
            f"train.{hook} is set but train.backend = {config.train.backend!r}; set "
            "train.backend = 'megatron' or remove it"
        )
    if config.train.backend == "megatron" and config.train.context_parallel_size > 1:
        raise ValueError(
            f"train.context_parallel_size = {config.train.context_parallel_size} is of "
            "train.backend = 'fsdp'; set megatron.context_parallel_size"
        )
