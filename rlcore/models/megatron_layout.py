"""How Megatron cuts a model over ranks, and whether a model can be cut like that.

Ranks are counted as Megatron counts them: those of one tensor-parallel group are neighbours, then
come context, expert and data parallel ones, and a stage of the pipeline has its ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture
from rlcore.weights.megatron import FAMILIES

Recompute = Literal["selective", "full"]
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
"""Settings of stages with a number of layers of their own."""


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """A layout; fields are named as Megatron's arguments."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    """None: as many as other stages have."""
    num_layers_in_last_pipeline_stage: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """None: as of the tensors that are no experts."""
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True
    recompute_granularity: Recompute | None = None

    @classmethod
    def of(cls, names: Mapping[str, object]) -> MegatronLayout:
        """The layout that some of Megatron's arguments ask for, by their names; others are left."""
        known = {field.name for field in fields(cls)}
        given = {k: v for k, v in names.items() if k in known and v is not None}
        return cls(**given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        named = {
            "tensor": self.tensor_model_parallel_size,
            "pipeline": self.pipeline_model_parallel_size,
            "context": self.context_parallel_size,
            "expert": self.expert_model_parallel_size,
        }
        cuts = [f"{name} {size}" for name, size in named.items() if size > 1]
        return ", ".join(cuts) or "data parallel alone"

    @property
    def expert_tensor(self) -> int:
        """Ranks that share the matrices of one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def of_one_model(self) -> int:
        """Ranks that work on the same tokens."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def layers_of_stages(self, layers: int) -> list[int]:
        """How many of a model's layers each stage of the pipeline has; what does not divide is
        left out.
        """
        stages = self.pipeline_model_parallel_size
        own = self._own_layers
        rest = stages - len(own)
        each = (layers - sum(own.values())) // rest if rest else 0
        return [own.get(stage, each) for stage in range(stages)]

    @property
    def _own_layers(self) -> dict[int, int]:
        """Layers of the stages whose number is set."""
        last = self.pipeline_model_parallel_size - 1
        named = (
            (0, self.num_layers_in_first_pipeline_stage),
            (last, self.num_layers_in_last_pipeline_stage),
        )
        return {stage: layers for stage, layers in named if layers is not None}


def check_layout(arch: Architecture, layout: MegatronLayout, ranks: int) -> None:
    """Make sure that a model can be cut, and laid out on so many ranks.

    Raises:
        ConfigError: all that does not divide, each with its setting.
    """
    if arch.model_type not in FAMILIES:
        raise ConfigError(
            f"megatron-core computes no {arch.model_type!r} models; use train.backend = 'fsdp'"
        )
    wrong = [*_wrong_numbers(layout)] or [*_wrong_ranks(layout, ranks), *_wrong_cuts(arch, layout)]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _wrong_numbers(layout: MegatronLayout) -> Iterator[str]:
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name.endswith("_size") and value is not None and value < 1:
            yield f"megatron.{field.name} = {value} must be at least 1"


def _wrong_ranks(layout: MegatronLayout, ranks: int) -> Iterator[str]:
    tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    if ranks % layout.of_one_model:
        yield (
            f"{ranks} trainer ranks (cluster.actor_num_nodes x actor_num_gpus_per_node) are no "
            f"multiple of tensor x pipeline x context parallel = {tensor} x {stages} x "
            f"{layout.context_parallel_size} = {layout.of_one_model}"
        )
    elif (ranks // stages) % (layout.expert_model_parallel_size * layout.expert_tensor):
        yield (
            f"the {ranks // stages} ranks of a pipeline's stage are no multiple of "
            f"megatron.expert_model_parallel_size x expert_tensor_parallel_size = "
            f"{layout.expert_model_parallel_size} x {layout.expert_tensor}"
        )


def _wrong_cuts(arch: Architecture, layout: MegatronLayout) -> Iterator[str]:
    tensor = layout.tensor_model_parallel_size
    cuts = {
        "attention heads": arch.num_attention_heads,
        "columns of the feed-forward layers": arch.intermediate_size if arch.dense_layers() else 0,
        "columns of the shared experts": arch.shared_expert_intermediate_size,
    }
    for what, number in cuts.items():
        if number % tensor:
            yield f"megatron.tensor_model_parallel_size = {tensor} does not divide {number} {what}"
    keys = arch.num_key_value_heads
    if not arch.is_latent and keys % tensor and tensor % keys:
        yield (
            f"megatron.tensor_model_parallel_size = {tensor} and the {keys} heads of keys and "
            "values divide in neither direction"
        )
    stages, layers = layout.pipeline_model_parallel_size, arch.num_hidden_layers
    found = layout.layers_of_stages(layers)
    if sum(found) != layers or min(found) < 1:
        own = [name for name in UNEVEN if getattr(layout, name) is not None]
        beside = f" beside megatron.{' and '.join(own)}" if own else ""
        yield (
            f"megatron.pipeline_model_parallel_size = {stages} does not divide {layers} "
            f"layers{beside}"
        )
    yield from _wrong_context(arch, layout)
    if layout.sequence_parallel and tensor == 1:
        yield "megatron.sequence_parallel = true has no effect without tensor parallel ranks"
    yield from _wrong_experts(arch, layout)


def _wrong_context(arch: Architecture, layout: MegatronLayout) -> Iterator[str]:
    """Ranks swap tokens for heads around attention, of those that a tensor-parallel rank has."""
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    heads, groups = arch.num_attention_heads // tensor, arch.num_key_value_heads // tensor
    if context > 1 and (heads % context or (groups % context and context % max(groups, 1))):
        yield (
            f"megatron.context_parallel_size = {context} must divide the {heads} heads of a "
            f"tensor-parallel rank, and divide or be a multiple of its {groups} heads of keys"
        )


def _wrong_experts(arch: Architecture, layout: MegatronLayout) -> Iterator[str]:
    experts, size = arch.num_experts, layout.expert_model_parallel_size
    if not experts:
        if size > 1:
            yield f"megatron.expert_model_parallel_size = {size}, but the model has no experts"
        return
    if experts % size:
        yield f"megatron.expert_model_parallel_size = {size} does not divide {experts} experts"
    if arch.moe_intermediate_size % layout.expert_tensor:
        yield (
            f"megatron.expert_tensor_parallel_size = {layout.expert_tensor} does not divide "
            f"{arch.moe_intermediate_size} columns of an expert"
        )
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        yield (
            "experts with tensor parallel ranks need megatron.sequence_parallel = true: Megatron "
            "trains them in no other way"
        )
