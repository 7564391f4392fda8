"""megatron-core's GPT model of an architecture, on this rank of any layout.

Transformer Engine is used where it is installed and CUDA is there; else megatron-core's own layers
with torch's attention. Either way checkpoints have the same names.

Invariant: nothing is random and nothing is dropped out: the policy that is trained is the one that
sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture
from rlcore.train.megatron.attention import TorchAttention
from rlcore.train.megatron.cpu import own_device
from rlcore.train.megatron.experts import grouped, lay_together
from rlcore.train.megatron.router import Router
from rlcore.train.megatron.table import BALANCING
from rlcore.train.trainer import DType
from rlcore.weights.megatron import FAMILIES, LOCAL_NAMES

LLAMA3_SCALING = (1.0, 4.0, 8192)
"""The only low and high frequency factors and original length that megatron-core computes."""

HAS_ENGINE = find_spec("transformer_engine") is not None
if not HAS_ENGINE:
    # 0.16 takes these for its own where Transformer Engine is missing.
    multi_latent_attention.HAVE_TE = False
    vars(moe_utils).setdefault("te_general_gemm", None)


def _counts_as_numbers(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Counts of tokens that are on the CPU already: no stream has to bring them there."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(counts := getattr(self, name), Tensor):
            setattr(self, name, counts.numpy())
    return tokens_per_expert


if not torch.cuda.is_available():
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts_as_numbers


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model lies on ranks."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int | None = None
    """Runs of layers on each stage, where schedules are interleaved."""
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    """None: as `tensor_parallel`."""
    sequence_parallel: bool = False

    def padded(self, vocab_size: int) -> int:
        """The rows of embedding and output layer: as many on every tensor-parallel rank."""
        return -(-vocab_size // self.tensor_parallel) * self.tensor_parallel


def build_model(
    arch: Architecture,
    layout: Layout,
    dtype: DType = "float32",
    more: Mapping[str, Any] | None = None,
    chunk: int | None = None,
) -> GPTModel:
    """This rank's part of a model, with weights yet to be loaded.

    Args:
        arch: its architecture.
        layout: the one that `megatron.core.parallel_state` was set up with.
        dtype: of parameters and arithmetic.
        more: further fields of megatron-core's `TransformerConfig`.
        chunk: which run of this stage's layers, where schedules are interleaved.

    Raises:
        ConfigError: megatron-core has no such model, or not in this layout.
    """
    fused = torch.cuda.is_available() and HAS_ENGINE
    settings = dict(more or {})
    _check_balancing(arch, settings)
    together = bool(settings.pop("moe_grouped_gemm", False))
    config = transformer_config(arch, layout, dtype, settings)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=chunk
    )
    _own_parts(spec, together=together)
    if not fused:
        _without_engine(spec, arch)
    if arch.model_type == "glm4":
        _sandwich(spec)
    scaling = arch.rope_scaling if not arch.is_latent else None
    model = _made(
        config,
        spec,
        vocab_size=layout.padded(arch.vocab_size),
        # Rotary positions have no table that this would size.
        max_sequence_length=0,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=arch.partial_rotary_factor,
        rotary_base=arch.rope_theta,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling.factor if scaling else 1.0,
        vp_stage=chunk,
    )
    if arch.is_latent and layout.tensor_parallel > 1:
        for layer in model.decoder.layers:
            _whole_down_projections(layer.self_attention, config)
    # Norms, routers and what else is not a projection of megatron-core's are made on the CPU.
    model = model.to(own_device(), getattr(torch, dtype))
    lay_together(model)
    return model


def _made(*args: Any, **kwargs: Any) -> GPTModel:
    """megatron-core's model, or its reasons for not making one in words of the table."""
    try:
        return GPTModel(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, ImportError, RuntimeError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise ConfigError(
            f"megatron-core makes no model of these settings of megatron.*: {why}"
        ) from error


def transformer_config(
    arch: Architecture, layout: Layout, dtype: DType, more: Mapping[str, Any]
) -> TransformerConfig:
    """megatron-core's configuration of an architecture."""
    _check(arch)
    values: dict[str, Any] = {
        "num_layers": arch.num_hidden_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.intermediate_size or arch.moe_intermediate_size,
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": arch.num_key_value_heads,
        "layernorm_epsilon": arch.rms_norm_eps,
        "qk_layernorm": arch.use_qk_norm,
        "add_qkv_bias": arch.attention_bias,
        "rotary_interleaved": arch.model_type == "glm4",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": layout.tensor_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        # Micro-batches are packed sequences, each of another length. An interleaved schedule mixes
        # up what goes both ways between two ranks in one batch.
        "variable_seq_lengths": layout.pipeline_parallel > 1 and not layout.virtual_pipeline,
        "overlap_p2p_comm": layout.virtual_pipeline is not None,
        "batch_p2p_comm": layout.virtual_pipeline is None,
        # A stream waits for what it receives; the host need not.
        "batch_p2p_sync": False,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": layout.expert_parallel,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": getattr(torch, dtype),
        "pipeline_dtype": getattr(torch, dtype),
        "bf16": dtype == "bfloat16",
        # Losses are normalised by the batch loop.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
    }
    kind = MLATransformerConfig if arch.is_latent else TransformerConfig
    values |= _latent(arch) if arch.is_latent else {"kv_channels": arch.head_dim}
    if arch.num_experts:
        values |= _experts(arch)
    try:
        return kind(**(values | dict(more)))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"megatron-core refuses these settings: {error}") from error


def _check(arch: Architecture) -> None:
    if arch.model_type not in FAMILIES:
        raise ConfigError(
            f"megatron-core computes no {arch.model_type!r} models; use train.backend = 'fsdp'"
        )
    scaling = arch.rope_scaling
    if scaling is None:
        return
    stretch = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    if (scaling.rope_type == "yarn") != arch.is_latent or (
        scaling.rope_type == "llama3" and stretch != LLAMA3_SCALING
    ):
        raise ConfigError(
            f"megatron-core computes no {scaling.rope_type!r} scaling of rotary positions like "
            "this model's; use train.backend = 'fsdp'"
        )


def _check_balancing(arch: Architecture, more: Mapping[str, Any]) -> None:
    """Whether what is said of experts, and what is to even out their use, can be."""
    if not arch.num_experts and (said := [name for name in more if name.startswith("moe_")]):
        raise ConfigError(f"megatron.{said[0]}: the model has no experts; leave it out")
    kind, coefficient = "moe_router_load_balancing_type", more.get("moe_aux_loss_coeff", 0.0)
    if (chosen := more.get(kind, "none")) not in BALANCING:
        raise ConfigError(f"megatron.{kind} = {chosen!r} must be one of {', '.join(BALANCING)}")
    if coefficient and chosen == "none":
        raise ConfigError(
            f"megatron.moe_aux_loss_coeff = {coefficient} has no effect without megatron.{kind}; "
            "set that to 'aux_loss'"
        )
    if kind in more and chosen != "none" and not coefficient:
        raise ConfigError(
            f"megatron.{kind} = {chosen!r} has no effect without megatron.moe_aux_loss_coeff"
        )
    if more.get("moe_router_bias_update_rate") and not arch.use_routing_bias:
        raise ConfigError(
            "megatron.moe_router_bias_update_rate moves biases of routers, and this model's have "
            "none; leave it out"
        )


def _latent(arch: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": arch.q_lora_rank or None,
        "kv_lora_rank": arch.kv_lora_rank,
        "qk_head_dim": arch.qk_nope_head_dim,
        "qk_pos_emb_head_dim": arch.qk_rope_head_dim,
        "v_head_dim": arch.v_head_dim,
        "rotary_base": arch.rope_theta,
        "rope_type": "yarn" if arch.rope_scaling else "rope",
        "rotary_scaling_factor": 1.0,
        "apply_rope_fusion": False,
    }
    if scaling := arch.rope_scaling:
        values |= {
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return values


def _experts(arch: Architecture) -> dict[str, Any]:
    """Routing as transformers computes it: softmax over the chosen, or sigmoids that sum to 1."""
    if arch.scoring_func == "sigmoid" and not arch.norm_topk_prob:
        raise ConfigError("megatron-core always divides sigmoid scores of experts by their sum")
    grouped = arch.n_group > 1
    return {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.num_experts_per_tok,
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": arch.shared_expert_intermediate_size or None,
        "moe_layer_freq": [int(arch.is_sparse(k)) for k in range(arch.num_hidden_layers)],
        "moe_router_score_function": arch.scoring_func,
        "moe_router_pre_softmax": arch.scoring_func == "softmax" and not arch.norm_topk_prob,
        "moe_router_enable_expert_bias": arch.use_routing_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": arch.n_group if grouped else None,
        "moe_router_group_topk": arch.topk_group if grouped else None,
        "moe_router_topk_scaling_factor": arch.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def _layers(spec: TransformerBlockSubmodules) -> Iterable[ModuleSpec]:
    return {id(one): one for one in spec.layer_specs}.values()


def _own_parts(spec: TransformerBlockSubmodules, *, together: bool) -> None:
    """Attention, routers and, if they are computed together, experts."""
    for layer in _layers(spec):
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = TorchAttention
        of_mlp = _of_mlp(layer)
        if hasattr(of_mlp, "router"):
            of_mlp.router = Router
            if together:
                of_mlp.experts = grouped(of_mlp.experts)


def _of_mlp(layer: ModuleSpec) -> Any:
    """What a layer's feed-forward part is made of."""
    # A function with arguments from 0.19 on.
    given = getattr(layer.submodules.mlp, "keywords", None)
    return given["submodules"] if given else layer.submodules.mlp.submodules


def _without_engine(spec: TransformerBlockSubmodules, arch: Architecture) -> None:
    """Torch's norms, and the names that checkpoints of Transformer Engine have."""
    spec.layer_norm = RmsNorm
    for layer in _layers(spec):
        parts = layer.submodules
        for part in (parts, parts.self_attention.submodules):
            for name, module in vars(part).items():
                if name.endswith("layernorm") and module is not IdentityOp:
                    setattr(part, name, RmsNorm)
        sparse = hasattr(_of_mlp(layer), "experts")
        parts.sharded_state_dict_keys_map = {
            own.removesuffix("weight"): stored.removesuffix("weight")
            for stored, own in LOCAL_NAMES.items()
            if not (sparse and own.startswith("pre_mlp"))
            and not (arch.is_latent and own.startswith("input"))
            and (arch.is_latent or "_up_proj" not in stored)
        }


def _sandwich(spec: TransformerBlockSubmodules) -> None:
    for layer in _layers(spec):
        layer.module = SandwichLayer


class RmsNorm(torch.nn.RMSNorm):
    """Torch's, which knows whether ranks normalise a part of the tokens each."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        # megatron-core's mark of weights whose gradient ranks must add up.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _whole_down_projections(attention: Any, config: TransformerConfig) -> None:
    """Latent attention's first projections, whole on every tensor-parallel rank.

    megatron-core's local ones are divided, and lose a part of the gradient there: that of the
    rotary keys, which all heads share, is not added up over the ranks that have the heads.
    """
    kept = config.kv_lora_rank
    attention.linear_kv_down_proj = WholeLinear(
        config, kept + config.qk_pos_emb_head_dim, shared=config.qk_pos_emb_head_dim
    )
    if config.q_lora_rank is not None:
        attention.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)


class WholeLinear(torch.nn.Module):
    """A projection that every tensor-parallel rank has, on the tokens that it has.

    Args:
        config: of the model.
        size: outputs.
        shared: how many of them, at the end, each rank uses for its own heads.
    """

    def __init__(self, config: TransformerConfig, size: int, shared: int = 0) -> None:
        super().__init__()
        weight = torch.empty(size, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        # With sequence parallelism, gathering tokens adds up their gradients.
        self.shared = 0 if config.sequence_parallel else shared

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., size], and no bias."""
        out = torch.nn.functional.linear(hidden, self.weight)
        if self.shared:
            own, shared = out.split([out.shape[-1] - self.shared, self.shared], -1)
            out = torch.cat([own, copy_to_tensor_model_parallel_region(shared)], -1)
        return out, None


class SandwichLayer(TransformerLayer):
    """A layer of GLM-4: attention and feed-forward are normalised before and behind."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_self_attn_layernorm = RmsNorm(config, size, eps)
        self.post_mlp_layernorm = RmsNorm(config, size, eps)
        self.self_attn_bda = self._normed(self.post_self_attn_layernorm)
        self.mlp_bda = self._normed(self.post_mlp_layernorm)
        # megatron-core's turns gradients on, also where nothing is to be passed back.
        self.bias_dropout_add_exec_handler = nullcontext

    @staticmethod
    def _normed(norm: torch.nn.Module) -> Any:
        """What takes the place of adding bias and residual."""

        def add(out: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
            x, bias = out
            return residual + norm(x if bias is None else x + bias)

        return lambda training, fused: add
