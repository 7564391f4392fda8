"""A Qwen3 policy that computes what SGLang does, operation by operation, so that log-probs are the
same to the last bit: `algorithm.true_on_policy_mode` with SGLang engines.

SGLang 0.5.16 with `rl_on_policy_target = "fsdp"` computes products of matrices, means and softmax
by kernels whose result for a row does not depend on the other rows, attention by FlashAttention 3
without splits, and the rest by plain torch operations in an order of its own:

    embeddings, the residual stream and norms of hidden states     float32
    a norm                     weight * (x rsqrt(mean x^2 + eps)), in float32
    what enters attention and MLP                                  bfloat16
    norms of queries and keys  the quotient rounded to bfloat16, times the weight in float32
    rotary embedding           float32, a compiled kernel; its result rounded to bfloat16
    log-probs                  logits in bfloat16 by the temperature, rounded; their log_softmax

Here the modules of transformers do the same. Where the engine's kernel has no backward, values are
the kernel's and gradients those of the same function in torch.

Invariant: on a GPU nothing of a forward pass takes another way than the engine's; elsewhere the
formulas are the same and the kernels torch's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlcore.algorithms.logprobs import chunked_log_probs
from rlcore.engine.sglang import DETERMINISTIC_ENV
from rlcore.errors import ConfigError
from rlcore.train.fsdp.attention import SequenceLayout, packed_attention

MODEL_TYPES = ("qwen3",)
CHUNK_ELEMENTS = 2**26
"""Logits that are held at once."""


@dataclass(frozen=True)
class Positions:
    """What the layers of one pass share."""

    cos: Tensor
    """float32 [T, 1, width / 2]"""
    sin: Tensor
    starts: Tensor
    """int64 [n]: the first token of each sequence."""


def compute_as_sglang(lm: Any, *, cuda: bool) -> None:
    """Change a model of transformers so; on a GPU also the products of all matrices of this
    process.

    Raises:
        ConfigError: it is no model that is known, or SGLang is not there.
    """
    kind = getattr(lm.config, "model_type", "?")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"algorithm.true_on_policy_mode with rollout.engine = 'sglang' knows models of type "
            f"{', '.join(MODEL_TYPES)}, not {kind!r}; leave the mode out, or bound the gap by "
            "algorithm.max_logprob_gap"
        )
    if cuda:
        _use_engine_kernels()
    base = lm.base_model
    base.embed_tokens.register_forward_hook(lambda module, args, out: out.float())
    base.rotary_emb.forward = MethodType(_positions, base.rotary_emb)
    base.norm.forward = MethodType(_norm, base.norm)
    for layer in base.layers:
        attention = layer.self_attn
        for norm in (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            attention.q_norm,
            attention.k_norm,
        ):
            norm.forward = MethodType(_norm, norm)
        attention.forward = MethodType(_attention, attention)
        layer.mlp.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))


def engine_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`chunked_log_probs` whose log-probs have the engine's values: rounded to bfloat16."""
    rounded = hidden.bfloat16()
    log_probs, entropy = chunked_log_probs(rounded, weight.bfloat16(), targets, temperature)
    with torch.no_grad():
        values = _log_softmax(rounded.detach(), weight.detach().bfloat16(), targets, temperature)
    return cast(Tensor, _Valued.apply(log_probs, values)), entropy


def _log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    rows = max(1, CHUNK_ELEMENTS // len(weight))
    found = []
    for states, ids in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = torch.matmul(states, weight.t())
        scale = torch.full((len(states), 1), temperature, device=hidden.device)
        scaled = logits.div(scale).bfloat16()
        found.append(torch.log_softmax(scaled, -1).gather(-1, ids[:, None])[:, 0].float())
    return torch.cat(found)


def _use_engine_kernels() -> None:
    for name, value in DETERMINISTIC_ENV.items():
        os.environ.setdefault(name, value)
    try:
        from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
    except ImportError as error:
        raise ConfigError(
            "algorithm.true_on_policy_mode with rollout.engine = 'sglang' computes by kernels of "
            f"SGLang, which cannot be imported where the trainer runs: {error}"
        ) from error
    enable_batch_invariant_mode(enable_bmm=False)


def _norm(module: Any, x: Tensor) -> Tensor:
    """Float32 of any input; the quotient is rounded to the type of the input."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    quotient = wide * torch.rsqrt(variance + module.variance_epsilon)
    return cast(Tensor, module.weight.float() * quotient.to(x.dtype))


def _positions(module: Any, x: Tensor, position_ids: Tensor) -> Positions:
    """In place of cosine and sine alone, for the attention below."""
    at = position_ids.flatten()
    config = module.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base = config.rope_parameters["rope_theta"]
    # On the CPU, as the engine does: powers on a GPU have other bits.
    steps = torch.arange(0, width, 2, dtype=torch.float, device="cpu") / width
    frequencies = (1.0 / (base**steps)).to(x.device)
    angles = (at.float()[:, None] * frequencies)[:, None]
    return Positions(angles.cos(), angles.sin(), (at == 0).nonzero()[:, 0])


def _attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Positions,
    attention_mask: Tensor | None = None,
    *,
    layout: SequenceLayout,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer's attention of [1, T, hidden]."""
    there, x = position_embeddings, hidden_states[0].bfloat16()
    query, key, value = (
        project(x).view(len(x), -1, module.head_dim)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = (
        cast(Tensor, _Rotated.apply(normed, there.cos, there.sin)).bfloat16()
        for normed in (module.q_norm(query), module.k_norm(key))
    )
    mixed = cast(Tensor, _Attended.apply(query, key, value, module, layout, there.starts))
    return module.o_proj(mixed.reshape(1, len(x), -1)), None


class _Rotated(torch.autograd.Function):
    """The rotary embedding of [T, heads, width] float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _compiled_rotate()(x, cos, sin) if x.is_cuda else rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(gradients[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of the first and second half of the last dimension."""
    first, second = torch.chunk(x, 2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, dim=-1)


@cache
def _compiled_rotate() -> Any:
    """Compiled, as the engine's is: a product and a sum in one rounding differ from two."""
    return torch.compile(rotate, dynamic=True)


class _Attended(torch.autograd.Function):
    """Attention [T, heads, width] by the engine's kernel, with the gradient of torch's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        module: nn.Module,
        layout: SequenceLayout,
        starts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.module, ctx.layout = module, layout
        if query.is_cuda:
            return _paged(query, key, value, module, layout, starts)
        return _plain(query, key, value, module, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            mixed = _plain(query, key, value, ctx.module, ctx.layout)
        return (*torch.autograd.grad(mixed, inputs, gradients[0]), None, None, None)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, module: Any, layout: SequenceLayout
) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    mixed, _ = packed_attention(
        module, query, key, value, None, layout=layout, scaling=module.scaling
    )
    return mixed[0]


def _paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    module: Any,
    layout: SequenceLayout,
    starts: Tensor,
) -> Tensor:
    """By FlashAttention 3 as the engine calls it: keys and values in a cache with pages of one
    token.
    """
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    tokens, device = len(query), query.device
    ends = torch.cat([starts[1:], torch.full((1,), tokens, device=device)])
    table = starts[:, None] + torch.arange(layout.longest, device=device)
    bounds = torch.cat([starts, ends[-1:]]).int()
    mixed = flash_attn_with_kvcache(
        q=query.contiguous(),
        k_cache=key.contiguous()[:, None],
        v_cache=value.contiguous()[:, None],
        page_table=table.clamp_(max=tokens - 1).int(),
        cache_seqlens=(ends - starts).int(),
        cu_seqlens_q=bounds,
        max_seqlen_q=layout.longest,
        softmax_scale=module.scaling,
        causal=True,
        num_splits=1,
    )
    return cast(Tensor, mixed)


class _Valued(torch.autograd.Function):
    """One tensor's gradient with another one's values."""

    @staticmethod
    def forward(ctx: Any, differentiated: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
