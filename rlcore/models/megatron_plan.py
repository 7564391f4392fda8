"""The same arithmetic as `rlcore.models.plan` for a model that Megatron lays out on ranks.

Parameters of a rank are counted tensor by tensor, by the rules that weights are converted with.
Stages of the pipeline differ: the plan is that of the one that needs the most memory.

Traffic is what one rank sends. Sums over a group are counted as rings: with n ranks each sends
2 (n - 1) / n of what is summed, and half of that to gather or scatter it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from rlcore.models.architecture import Architecture
from rlcore.models.megatron_layout import MegatronLayout, check_layout
from rlcore.models.plan import (
    CONTEXT,
    GRADIENT,
    LINK_SHARE,
    MASTER,
    MOMENTS,
    RECOMPUTED,
    TRAINED,
    UTILISATION,
    Gpu,
    Plan,
    Work,
    forward_flops,
    layer_norm_bytes,
    layer_numbers,
    logits,
)
from rlcore.models.tensors import size_of
from rlcore.weights.megatron import rules


@dataclass(frozen=True, slots=True)
class Share:
    """Parameters of one rank."""

    dense: int = 0
    expert: int = 0
    """Of routed experts."""

    def __add__(self, other: Share) -> Share:
        return Share(self.dense + other.dense, self.expert + other.expert)


def plan_megatron(arch: Architecture, work: Work, layout: MegatronLayout, gpu: Gpu) -> Plan:
    """Count what training a model in a layout of Megatron needs.

    Raises:
        ConfigError: the model cannot be cut like that, or not on so many ranks.
    """
    check_layout(arch, layout, work.ranks)
    size, shares = size_of(arch), stage_shares(arch, layout)
    replicas = work.ranks // layout.of_one_model
    of_a_batch = replicas * layout.context_parallel_size * work.tokens_per_micro_batch
    micro_batches = ceil(work.tokens_per_step / of_a_batch)
    memories = [
        stage_memory(arch, work, layout, share, stage, micro_batches, gpu)
        for stage, share in enumerate(shares)
    ]
    memory = max(memories, key=lambda one: sum(one.values()))
    largest = max(shares, key=lambda share: share.dense + share.expert)
    sent = traffic(arch, work, layout, largest, micro_batches)
    full = RECOMPUTED if layout.recompute_granularity == "full" else TRAINED
    passes = (1 + work.critic) * full + work.frozen
    flops = passes * forward_flops(arch, work.sequence) * work.tokens_per_step * work.steps
    waits = (layout.pipeline_model_parallel_size - 1) / micro_batches
    seconds = {kind: sent[kind] / _speed(kind, work, layout, gpu) for kind in sent}
    beside = seconds["gradients and weights"] + seconds["pipeline"]
    return Plan(
        size.parameters,
        size.active_parameters,
        memory,
        gpu.memory * (1 - work.engine_share),
        sent,
        flops / (work.ranks * gpu.flops * UTILISATION) * (1 + waits),
        beside,
        sum(seconds.values()) - beside,
    )


def stage_shares(arch: Architecture, layout: MegatronLayout) -> list[Share]:
    """Parameters of a rank of each stage of the pipeline."""
    stages = layout.pipeline_model_parallel_size
    shares = [Share() for _ in range(stages)]
    ends = list(accumulate(layout.layers_of_stages(arch.num_hidden_layers)))
    for rule in rules(arch):
        last = not rule.megatron.startswith("embedding")
        stage = stages - 1 if last else 0
        if rule.layer is not None:
            stage = bisect(ends, rule.layer)
        # Latent attention's first projections are whole on every rank.
        divide = None if "_down_proj" in rule.megatron else rule.divide
        shares[stage] += _share(rule.shape, divide, rule.expert is not None, layout)
    if arch.tie_word_embeddings and stages > 1:
        # The output layer's stage has a copy of the embedding.
        outer = (arch.vocab_size, arch.hidden_size)
        shares[-1] += _share(outer, 0, False, layout)
    return shares


def _share(
    shape: tuple[int, ...], divide: int | None, expert: bool, layout: MegatronLayout
) -> Share:
    parts = layout.expert_tensor if expert else layout.tensor_model_parallel_size
    own = list(shape)
    if divide is not None:
        own[divide] = ceil(own[divide] / parts)
    if not expert:
        return Share(dense=prod(own))
    # All experts are counted, and a rank has one of every so many.
    return Share(expert=prod(own) // layout.expert_model_parallel_size)


def stage_memory(
    arch: Architecture,
    work: Work,
    layout: MegatronLayout,
    share: Share,
    stage: int,
    micro_batches: int,
    gpu: Gpu,
) -> dict[str, float]:
    """Bytes of one rank of a stage, by kind."""
    own = share.dense + share.expert
    models = 1 + work.critic
    master = MASTER if work.bytes_of_numbers < MASTER else 0
    replicas = _replicas(work, layout)
    divided = {kind: replicas[kind] if layout.use_distributed_optimizer else 1 for kind in replicas}
    stored = share.dense / divided["dense"] + share.expert / divided["expert"]
    stages = layout.pipeline_model_parallel_size
    in_flight = min(stages - stage, micro_batches)
    moments = 0 if work.offloads else MOMENTS
    of_logits = logits(arch, work, gpu, layout.tensor_model_parallel_size)
    return {
        "weights": float(own * work.bytes_of_numbers * models),
        "gradients": float(own * GRADIENT * models),
        "optimizer": stored * (master + moments) * models,
        "frozen models": float(own * work.bytes_of_numbers * work.frozen),
        "activations": activations(arch, work, layout, in_flight, stage),
        "logits": of_logits if stage == stages - 1 else 0.0,
        "CUDA and NCCL": CONTEXT,
    }


def activations(
    arch: Architecture, work: Work, layout: MegatronLayout, in_flight: int = 1, stage: int = 0
) -> float:
    """Bytes that backward needs of the micro-batches that a stage has begun and not ended.

    With full recomputation: the input of every layer, and all of one layer. Selective recomputation
    makes attention anew, whose scores are never kept here anyway, and saves nothing more.
    """
    tensor, number = layout.tensor_model_parallel_size, work.bytes_of_numbers
    along = tensor if layout.sequence_parallel else 1
    whole = (2 * arch.hidden_size * number + layer_norm_bytes(arch)) / along
    whole += (layer_numbers(arch) - 2 * arch.hidden_size) * number / tensor
    if arch.num_experts:
        # What experts are given: a copy of a token for each.
        whole += arch.num_experts_per_tok * arch.hidden_size * number / along
    layers = in_flight * layout.layers_of_stages(arch.num_hidden_layers)[stage]
    tokens = work.tokens_per_micro_batch
    if layout.recompute_granularity != "full":
        return float(tokens * layers * whole)
    return float(tokens * (layers * arch.hidden_size * number / along + whole))


def traffic(
    arch: Architecture, work: Work, layout: MegatronLayout, share: Share, micro_batches: int
) -> Mapping[str, float]:
    """Bytes that a rank sends in an iteration, by kind."""
    tensor, parts = layout.tensor_model_parallel_size, layout.context_parallel_size
    stages, number = layout.pipeline_model_parallel_size, work.bytes_of_numbers
    along = tensor if layout.sequence_parallel else 1
    layers = arch.num_hidden_layers / stages
    sparse = (arch.num_hidden_layers - arch.dense_layers()) / stages
    hidden = work.tokens_per_micro_batch * arch.hidden_size * number
    keys = 2 * arch.num_key_value_heads * arch.head_dim
    if arch.is_latent:
        keys = arch.num_attention_heads * (
            arch.qk_nope_head_dim + arch.qk_rope_head_dim + arch.v_head_dim
        )
    again = int(layout.recompute_granularity == "full")
    # Of attention and of feed-forward, each forward and backward; with sequence parallel ranks the
    # inputs are gathered once more for the gradients of the weights.
    sums = 2 * (2 + again) * 2 + (2 if layout.sequence_parallel else 0)
    routed = arch.num_experts_per_tok * hidden / along * 2 * (2 + again)
    experts = layout.expert_model_parallel_size
    passes = (1 + work.critic) * micro_batches * work.steps
    return {
        "tensor": passes * layers * sums * hidden * _others(tensor),
        "context": passes
        * layers
        * (2 + again)
        * (parts - 1)
        * keys
        / tensor
        * work.tokens_per_micro_batch
        * number,
        "expert": passes * sparse * routed * _others(experts),
        "pipeline": passes * 2 * hidden / along if stages > 1 else 0.0,
        "gradients and weights": (1 + work.critic) * work.steps * _data(work, layout, share),
    }


def _data(work: Work, layout: MegatronLayout, share: Share) -> float:
    """Bytes of an optimizer step: gradients are scattered and new weights gathered, or gradients
    summed.
    """
    each = GRADIENT + work.bytes_of_numbers if layout.use_distributed_optimizer else 2 * GRADIENT
    replicas = _replicas(work, layout)
    dense, expert = (_others(replicas[kind]) for kind in ("dense", "expert"))
    return each * (share.dense * dense + share.expert * expert)


def _replicas(work: Work, layout: MegatronLayout) -> dict[str, int]:
    """Ranks that hold the same parameters."""
    of_a_stage = work.ranks // layout.pipeline_model_parallel_size
    return {
        "dense": of_a_stage // layout.tensor_model_parallel_size,
        "expert": of_a_stage // (layout.expert_model_parallel_size * layout.expert_tensor),
    }


def _others(ranks: int) -> float:
    """The share that a rank of a ring sends."""
    return (ranks - 1) / ranks


def _speed(kind: str, work: Work, layout: MegatronLayout, gpu: Gpu) -> float:
    """Bytes a second of a kind of traffic: in a node as long as its groups fit in one."""
    tensor, parts = layout.tensor_model_parallel_size, layout.context_parallel_size
    span = {
        "tensor": tensor,
        "context": tensor * parts,
        "expert": layout.expert_tensor * layout.expert_model_parallel_size,
    }.get(kind, work.ranks)
    return (gpu.link if span <= work.ranks_per_node else gpu.network) * LINK_SHARE
