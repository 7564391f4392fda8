"""The section `weights`: how new weights reach the engines."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from rlcore.config.section import FunctionPath, PositiveInt, Section

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig

TransportName = Literal["disk", "tensor", "distributed", "delta"]


class WeightsConfig(Section):
    """How new weights reach the engines."""

    OPERATIONAL = frozenset({"update_weight_buffer_size"})

    transport: TransportName = "disk"
    """`disk`: a folder; `tensor`: HTTP, or memory of a shared GPU; `distributed`: by broadcast;
    `delta`: what changed, through the store."""
    delta_base_interval: PositiveInt = 20
    """With `delta`: how many versions of changes follow on one that is whole in the store."""
    update_weight_buffer_size: PositiveInt = 512 * 2**20
    """Most bytes of weights that travel at once, but for a single larger tensor; not with disk."""
    lora_as_adapter: bool = False
    """With model.lora_rank: engines get the adapter and add it themselves, not merged weights."""
    canary_prompts: Annotated[int, Field(ge=1)] = 4
    """Fixed token sequences whose log-probs engine and trainer must agree on after each sync."""
    canary_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest mean absolute difference; default: 1e-4 where both compute in float32, else 0.3."""
    custom_update_weight_post_write_path: FunctionPath | None = None
    """A function `(args, version_dir, rollout_engines)` that is told of each folder of weights."""

    @model_validator(mode="after")
    def _something_is_written(self) -> "WeightsConfig":
        if self.custom_update_weight_post_write_path and self.transport != "disk":
            raise ValueError(
                "weights.custom_update_weight_post_write_path is about the folders of "
                "weights.transport = 'disk'; use that, or remove it"
            )
        default = type(self).model_fields["delta_base_interval"].default
        if self.delta_base_interval != default and self.transport != "delta":
            raise ValueError(
                f"weights.delta_base_interval = {self.delta_base_interval} is of weights.transport "
                f"= 'delta'; use that, or leave it at {default}"
            )
        return self


def check_transport(config: "RunConfig") -> None:
    """Weights can go the way that is asked for."""
    transport, colocate = config.weights.transport, config.cluster.colocate
    if config.rollout.hf_checkpoint is not None:
        _check_fp8(config)
    if config.weights.lora_as_adapter:
        _check_adapter(config)
    if config.rollout.engine != "sglang":
        return
    if transport not in ("disk", "delta") and config.cluster.device == "cpu":
        raise ValueError(
            f"weights.transport = {transport!r} with rollout.engine = 'sglang' goes from GPU "
            "to GPU, but cluster.device = 'cpu'; use 'disk'"
        )
    if transport == "tensor" and not colocate:
        raise ValueError(
            "weights.transport = 'tensor' with rollout.engine = 'sglang': engines read the "
            "trainer's GPU memory, which needs cluster.colocate = true; use 'distributed'"
        )
    if transport == "distributed" and colocate:
        raise ValueError(
            "weights.transport = 'distributed' with cluster.colocate = true: NCCL has no group "
            "with two members on one GPU; use 'tensor'"
        )


def _check_fp8(config: "RunConfig") -> None:
    """Weights in 8 bits have engines that take them, and a way to get there."""
    if config.rollout.engine != "sglang":
        raise ValueError(
            "rollout.hf_checkpoint is a folder in fp8 for rollout.engine = 'sglang'; the embedded "
            "engine computes in float32 from model.path: remove it"
        )
    if config.weights.transport == "tensor":
        raise ValueError(
            "weights.transport = 'tensor' sends no fp8 weights, which rollout.hf_checkpoint asks "
            "for; use 'disk' or 'distributed'"
        )


def _check_adapter(config: "RunConfig") -> None:
    what = "weights.lora_as_adapter = true"
    if config.model.lora_rank is None:
        raise ValueError(f"{what} needs an adapter: set model.lora_rank, or remove it")
    if config.weights.transport != "disk":
        raise ValueError(
            f"{what} with weights.transport = {config.weights.transport!r}: an adapter travels as "
            "a folder; use 'disk'"
        )
    if config.is_fully_async:
        raise ValueError(
            f"{what} with run.mode = 'fully-async': an engine changes adapters only while nothing "
            "is generated; remove it, and merged weights are sent"
        )
    if config.weights.custom_update_weight_post_write_path:
        raise ValueError(
            f"{what} with weights.custom_update_weight_post_write_path, which is told of folders "
            "of merged weights; remove one of them"
        )
    if config.offloads_rollout:
        raise ValueError(
            f"{what} with cluster.offload_rollout, which cluster.colocate turns on: the weights of "
            "an engine come back without values; set cluster.offload_rollout = false"
        )
    if config.rollout.engine_urls:
        raise ValueError(
            f"{what} with rollout.engine_urls: those engines hold other weights than the starting "
            "model's, to which the adapter belongs; remove it"
        )
