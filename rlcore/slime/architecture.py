"""slime's MODEL_ARGS: Megatron's flags for an architecture, held against what the model is.

The truth is the checkpoint's config.json. Where that is not on this machine, a preset must have all
that the flags say. A flag that neither bears out is an error, since slime would train another model
with it than the checkpoint holds.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.models.architecture import FLOAT_TOLERANCE, Architecture
from rlcore.models.hf_config import read_hf_config
from rlcore.models.presets import preset_names, read_preset

Flags = Mapping[str, Any]
WHOLE = ("num-layers", "hidden-size")
"""Flags whose presence says that all others of the architecture are given too."""
NUMBERS = {
    "num-layers": "num_hidden_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "intermediate_size",
    "num-attention-heads": "num_attention_heads",
    "num-query-groups": "num_key_value_heads",
    "kv-channels": "head_dim",
    "vocab-size": "vocab_size",
    "norm-epsilon": "rms_norm_eps",
    "rotary-base": "rope_theta",
    "rotary-percent": "partial_rotary_factor",
    "num-experts": "num_experts",
    "moe-router-topk": "num_experts_per_tok",
    "moe-ffn-hidden-size": "moe_intermediate_size",
    "moe-shared-expert-intermediate-size": "shared_expert_intermediate_size",
    "moe-router-num-groups": "n_group",
    "moe-router-group-topk": "topk_group",
    "moe-router-topk-scaling-factor": "routed_scaling_factor",
    "moe-router-score-function": "scoring_func",
    "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_nope_head_dim",
    "qk-pos-emb-head-dim": "qk_rope_head_dim",
    "v-head-dim": "v_head_dim",
}
"""Flags with a value, and the field of `Architecture` that has the same."""
IDLE_IF_LATENT = frozenset({"num-query-groups", "kv-channels"})
"""Flags that latent attention does not read."""


def match_architecture(given: Flags, checkpoint: Path) -> str | None:
    """Hold the architecture flags of a launch line against the model.

    Args:
        given: the arguments of the line by name, without dashes.
        checkpoint: its --hf-checkpoint.

    Returns:
        The preset that the flags are, if the checkpoint is not here to be read.

    Raises:
        ConfigError: naming each flag that says something else than the model.
    """
    if not any(name in given for name in (*NUMBERS, *_switches(None))):
        return None
    if (checkpoint / "config.json").is_file():
        arch, source = read_hf_config(checkpoint), f"{checkpoint / 'config.json'}"
        if wrong := list(disagreements(given, arch)):
            raise ConfigError("\n".join(f"{flag}: {source} has {value}" for flag, value in wrong))
        return None
    if not all(name in given for name in WHOLE):
        return None
    found = {
        name: list(disagreements(given, read_preset(name).architecture)) for name in preset_names()
    }
    nearest = min(found, key=lambda name: len(found[name]))
    if not found[nearest]:
        return nearest
    raise ConfigError(
        "\n".join(
            f"{flag}: the nearest preset, {nearest}, has {value}; put the checkpoint where "
            "--hf-checkpoint names it, so that its config.json can be read, or mend the flag"
            for flag, value in found[nearest]
        )
    )


def disagreements(given: Flags, arch: Architecture) -> Iterator[tuple[str, str]]:
    """(flag as given, what the model has), for each flag that is not of this architecture."""
    for name, field in NUMBERS.items():
        idle = arch.is_latent and name in IDLE_IF_LATENT
        idle = idle or (name == "ffn-hidden-size" and not arch.dense_layers())
        value = getattr(arch, field)
        if name in given and not idle and not _same(given[name], value):
            yield f"--{name} {given[name]}", f"{field} = {value}"
    yield from _scaling(given, arch)
    if "moe-layer-freq" in given and arch.num_experts:
        sparse = [int(arch.is_sparse(k)) for k in range(arch.num_hidden_layers)]
        if layer_pattern(given["moe-layer-freq"], arch.num_hidden_layers) != sparse:
            first = f"first_k_dense_replace = {arch.first_k_dense_replace}"
            yield f"--moe-layer-freq {given['moe-layer-freq']}", first
    whole = all(name in given for name in WHOLE)
    for name, value in _switches(arch).items():
        if name in given and not value:
            yield f"--{name}", "no such thing"
        elif whole and value and name not in given:
            yield f"no --{name}", "it"


def _scaling(given: Flags, arch: Architecture) -> Iterator[tuple[str, str]]:
    scaling = arch.rope_scaling
    factor = scaling.factor if scaling else 1.0
    if "rotary-scaling-factor" in given and given["rotary-scaling-factor"] != factor:
        yield f"--rotary-scaling-factor {given['rotary-scaling-factor']}", f"{factor}"
    for name in ("mscale", "mscale-all-dim"):
        value = getattr(scaling, name.replace("-", "_"), given.get(name))
        if name in given and given[name] != value:
            yield f"--{name} {given[name]}", f"{value}"


def _switches(arch: Architecture | None) -> dict[str, bool]:
    """Flags without a value, and whether an architecture has them."""
    if arch is None:
        return dict.fromkeys(_switches(read_preset("qwen3-4B").architecture), False)
    return {
        "untie-embeddings-and-output-weights": not arch.tie_word_embeddings,
        "qk-layernorm": arch.use_qk_norm,
        "add-qkv-bias": arch.attention_bias,
        "multi-latent-attention": arch.is_latent,
        "moe-router-enable-expert-bias": arch.use_routing_bias,
        "moe-shared-expert-gate": arch.shared_expert_gate,
        "attention-output-gate": arch.attn_output_gate,
        "use-rope-scaling": arch.rope_scaling is not None
        and arch.rope_scaling.rope_type == "llama3",
        "post-self-attn-layernorm": arch.model_type == "glm4",
        "post-mlp-layernorm": arch.model_type == "glm4",
        "rotary-interleaved": arch.model_type == "glm4",
    }


def _same(said: Any, value: Any) -> bool:
    if isinstance(value, float):
        return abs(said - value) <= FLOAT_TOLERANCE * abs(value)
    return bool(said == value)


def layer_pattern(text: str, layers: int) -> list[int]:
    """Which layers have experts: `[0]*3+[1]*58`, `[0,1,1]`, or every so many layers.

    Raises:
        ConfigError: it is none of these.
    """
    out: list[int] = []
    try:
        if text.strip().isdigit():
            every = int(text)
            return [int(k % every == 0) for k in range(layers)]
        for part in re.sub(r"\s", "", text).strip("()").split("+"):
            numbers, _, times = part.partition("*")
            out += [int(n) for n in ast.literal_eval(numbers)] * int(times or 1)
    except (ValueError, SyntaxError, TypeError, ZeroDivisionError):
        raise ConfigError(
            f"--moe-layer-freq {text}: it is written as [0]*3+[1]*58, or as one number"
        ) from None
    return out
