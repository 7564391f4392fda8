"""From a Hugging Face config.json to an `Architecture`.

Families call the same thing by different names, and leave out what is always so in them: `FAMILIES`
holds the latter. A family that is not in it is refused, since a guess would miscount.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture

Config = Mapping[str, Any]

_SIGMOID = {"scoring_func": "sigmoid", "use_routing_bias": True}
_LATENT = {**_SIGMOID, "use_qk_norm": True}
_DELTA = {"use_qk_norm": True, "attn_output_gate": True, "full_attention_interval": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mimo": {"attention_bias": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"use_qk_norm": True},
    "qwen3_moe": {"use_qk_norm": True},
    "qwen3_next": {**_DELTA, "shared_expert_gate": True, "partial_rotary_factor": 0.25},
    "qwen3_5": {**_DELTA, "partial_rotary_factor": 0.25},
    "qwen3_5_moe": {**_DELTA, "shared_expert_gate": True, "partial_rotary_factor": 0.25},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**_SIGMOID, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "deepseek_v3": _LATENT,
    "minimax_m2": {**_SIGMOID, "use_qk_norm": True},
}
"""What a family's configs may leave unsaid."""
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Families that are another one under a name of their own."""
OTHER_NAMES = {"num_experts": ("n_routed_experts", "num_local_experts")}
"""Other names of fields of `Architecture`."""
WHERE_EXPERTS_ARE_ALL = frozenset({"minimax_m2"})
"""Families that call the width of an expert `intermediate_size` and have no dense layer."""


def read_hf_config(folder: Path) -> Architecture:
    """The architecture of the model in a Hugging Face folder.

    Raises:
        ConfigError: there is no config.json, or it is of an unknown family, or lacks a field.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no config.json; give a Hugging Face folder") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    return from_hf(config, str(path))


def from_hf(config: Config, where: str = "config.json") -> Architecture:
    """The architecture that a config describes; `where` names it in errors."""
    text = config.get("text_config") or config
    family = str(text.get("model_type", config.get("model_type"))).removesuffix("_text")
    family = SAME_AS.get(family, family)
    if family not in FAMILIES:
        raise ConfigError(
            f"{where} is of type {family!r}, whose architecture is not known; there are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    fields: dict[str, Any] = {**FAMILIES[family], "model_type": family}
    for name in Architecture.model_fields:
        for key in (name, *OTHER_NAMES.get(name, ())):
            if text.get(key) is not None and name not in ("model_type", "rope_scaling"):
                fields[name] = text[key]
    fields.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
    try:
        fields |= _heads(text) | _rotary(text) | _experts(family, text) | _layers(text, where)
        return Architecture.model_validate(fields)
    except KeyError as error:
        raise ConfigError(f"{where} has no {error.args[0]}") from None
    except ValidationError as error:
        names = ", ".join(".".join(map(str, one["loc"])) for one in error.errors())
        raise ConfigError(f"{where} does not give {names} as a model needs it") from None


def _heads(text: Config) -> dict[str, Any]:
    heads = text["num_attention_heads"]
    return {
        "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
    }


def _rotary(text: Config) -> dict[str, Any]:
    """Rotary settings: in one table since transformers 5, in several keys before."""
    table = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    out: dict[str, Any] = {"rope_theta": table.get("rope_theta") or text["rope_theta"]}
    if "partial_rotary_factor" in table:
        out["partial_rotary_factor"] = table["partial_rotary_factor"]
    elif "rotary_dim" in text:
        out["partial_rotary_factor"] = text["rotary_dim"] / text["head_dim"]
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default" and table.get("factor", 1.0) != 1.0:
        known = (
            "factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast "
            "beta_slow mscale mscale_all_dim"
        )
        scaling = {key: table[key] for key in known.split() if table.get(key) is not None}
        out["rope_scaling"] = {"rope_type": kind, **scaling}
    return out


def _experts(family: str, text: Config) -> dict[str, Any]:
    """How experts are sized and which layers have them."""
    out: dict[str, Any] = {}
    if "n_shared_experts" in text:
        shared = (text["n_shared_experts"] or 0) * text["moe_intermediate_size"]
        out["shared_expert_intermediate_size"] = shared
    if family in WHERE_EXPERTS_ARE_ALL:
        out["moe_intermediate_size"] = text["intermediate_size"]
        out["intermediate_size"] = 0
    return out


def _layers(text: Config, where: str) -> dict[str, Any]:
    """Which layers are dense, and which attend to all tokens."""
    out: dict[str, Any] = {}
    count = text["num_hidden_layers"]
    if kinds := text.get("mlp_layer_types"):
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (count - dense):
            raise ConfigError(f"{where}: dense layers behind ones with experts are not known")
        out["first_k_dense_replace"] = dense
    elif text.get("decoder_sparse_step", 1) != 1 or text.get("mlp_only_layers"):
        dense = len(text.get("mlp_only_layers") or ())
        if text.get("decoder_sparse_step", 1) != 1 or text["mlp_only_layers"] != [*range(dense)]:
            raise ConfigError(f"{where}: dense layers behind ones with experts are not known")
        out["first_k_dense_replace"] = dense
    types = text.get("layer_types") or []
    if "linear_attention" in types:
        every = types.index("full_attention") + 1 if "full_attention" in types else count + 1
        if any(
            (kind == "full_attention") != ((k + 1) % every == 0) for k, kind in enumerate(types)
        ):
            raise ConfigError(f"{where}: layer_types has no regular interval of full attention")
        out["full_attention_interval"] = every
    return out
