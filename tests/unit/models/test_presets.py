"""Presets: their arithmetic against published sizes, and against transformers and config.json."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig
from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture, differences
from rlcore.models.hf_config import from_hf, read_hf_config
from rlcore.models.presets import check_preset, preset_names, read_preset
from rlcore.models.tensors import size_of, tensors
from rlcore.starting_model import check_in_place, prepare_model
from rlcore.store.objects import Objects

EXACT_DIGITS = 7
"""A figure of so many significant digits was not rounded."""
ROUNDED = 0.011
"""Makers round as they like: 355B for 352.8B."""
CUTS = {"deepseek-v3-5layer": "deepseek-v3", "deepseek-v3-20layer": "deepseek-v3"}
WITHOUT_FIGURE = {*CUTS, "glm4-32B"}


def digits(number: int) -> int:
    return len(str(number).rstrip("0"))


def rounded(number: float, like: int) -> int:
    """`number` with as many significant digits as `like`."""
    return int(float(f"{number:.{digits(like)}g}"))


@pytest.mark.parametrize("name", preset_names())
def test_the_arithmetic_gives_the_published_size(name: str) -> None:
    preset = read_preset(name)
    arch, published = preset.architecture, preset.published
    size = size_of(arch)
    if name in WITHOUT_FIGURE:
        assert published.parameters == 0
        return
    whole = size.parameters + published.beside_decoder
    if digits(published.parameters) >= EXACT_DIGITS:
        assert whole == published.parameters
    else:
        near = abs(whole / published.parameters - 1) <= ROUNDED
        assert near or rounded(whole, published.parameters) == published.parameters
    assert bool(published.active_parameters) == bool(arch.num_experts)
    if arch.num_experts:
        outer = 2 * arch.vocab_size * arch.hidden_size
        low = rounded(size.active_parameters - outer, published.active_parameters)
        high = rounded(size.active_parameters, published.active_parameters)
        assert low <= published.active_parameters <= high
    else:
        assert size.active_parameters == size.parameters


def test_presets_without_a_published_figure_are_variants_of_one_that_has_it() -> None:
    for name, whole in CUTS.items():
        found = list(differences(read_preset(name).architecture, read_preset(whole).architecture))
        assert [field for field, *_ in found] == ["num_hidden_layers"]
    rumination = read_preset("glm4-32B").architecture
    plain = rumination.model_copy(update={"num_hidden_layers": 61, "num_key_value_heads": 2})
    assert round(size_of(plain).parameters / 1e9, 2) == 32.57


def test_every_model_that_slime_has_a_script_for_is_there() -> None:
    assert len(preset_names()) == 39
    assert {"qwen3-4B", "glm4.5-355B-A32B", "kimi-k2", "minimax-m2"} <= set(preset_names())


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TINY_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TINY_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
TINY_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": TINY_EXPERTS,
    "qwen3_next": {**TINY_EXPERTS, **TINY_DELTA, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": TINY_DELTA,
    "qwen3_5_moe_text": {**TINY_EXPERTS, **TINY_DELTA, "shared_expert_intermediate_size": 24},
    "glm4": {},
    "glm4_moe": {**TINY_ROUTED, "first_k_dense_replace": 1, "attention_bias": True},
    "glm4_moe_lite": {**TINY_ROUTED, **TINY_LATENT, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "glm_moe_dsa": {
        **TINY_ROUTED,
        **TINY_LATENT,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"],
    },
    "deepseek_v3": {**TINY_ROUTED, **TINY_LATENT, "first_k_dense_replace": 1, "n_group": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def as_published(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """A tensor of transformers as checkpoints have it: with each expert on its own."""
    found = re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)", name)
    if found is None:
        return [(name, shape)]
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[found[2]]
    own = (shape[1] // len(parts), shape[2])
    return [
        (f"{found[1]}.mlp.experts.{e}.{part}.weight", own)
        for e in range(shape[0])
        for part in parts
    ]


@pytest.mark.parametrize("family", TINY_MODELS)
def test_names_and_shapes_are_those_of_transformers(family: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in {**TINY, **TINY_MODELS[family]}.items() if v is not None}
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    theirs = [pair for k, v in state.items() for pair in as_published(k, tuple(v.shape))]
    arch = from_hf(json.loads(config.to_json_string(use_diff=False)))
    ours = {
        spec.name.replace("model.language_model.", "model."): spec.shape for spec in tensors(arch)
    }
    if family == "minimax_m2":
        theirs = [(minimax(name), shape) for name, shape in theirs]
    assert ours == dict(theirs)


def minimax(name: str) -> str:
    """transformers renames what the checkpoints of MiniMax hold."""
    for ours, theirs in (
        ("mlp.gate.e_score", "block_sparse_moe.e_score"),
        ("mlp.e_score", "block_sparse_moe.e_score"),
        ("mlp.", "block_sparse_moe."),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    ):
        name = name.replace(ours, theirs)
    return name


QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}


def folder_with(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_config_json_gives_the_same_description(tmp_path: Path) -> None:
    assert read_hf_config(folder_with(tmp_path, QWEN3_4B)) == read_preset("qwen3-4B").architecture
    check_preset("qwen3-4B", tmp_path)


def test_a_preset_of_another_model_is_refused_by_field(tmp_path: Path) -> None:
    folder_with(tmp_path, {**QWEN3_4B, "num_hidden_layers": 28, "rope_theta": 5000000})
    with pytest.raises(
        ConfigError, match=r"rope_theta is 1000000.0 in the preset and 5000000"
    ) as e:
        check_preset("qwen3-4B", tmp_path)
    assert "num_hidden_layers is 36 in the preset and 28" in str(e.value)


@pytest.mark.parametrize("kept", ["disk", "memory"])
def test_a_model_that_is_built_is_the_preset_s(tmp_path: Path, kept: str) -> None:
    where = {"disk": str(tmp_path / "root"), "memory": f"memory://{tmp_path.name}"}[kept]
    objects, scratch = Objects.open(where), tmp_path / "scratch"
    (tmp_path / "own.py").write_text(
        "import json, pathlib\ndef build(folder, seed):\n"
        f"    (folder / 'config.json').write_text(json.dumps({QWEN3_4B!r}))\n"
    )
    right = ModelConfig(build=f"{tmp_path}/own.py:build", preset="qwen3-4B")
    wrong = right.model_copy(update={"preset": "qwen3-8B"})
    with pytest.raises(ConfigError, match=r"model\.preset = 'qwen3-8B' .*hidden_size is 4096 in"):
        prepare_model(objects, "x", wrong, 0, tmp_path / "first")
    prepare_model(objects, "x", right, 0, scratch)
    # It is named when the model is there already, too, as in a run that goes on.
    with pytest.raises(ConfigError, match=r"hidden_size is 4096 in the preset and 2560"):
        check_in_place(objects, "x", wrong, scratch)
    check_in_place(objects, "x", right, scratch)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen3-4B'"):
        read_preset("qwen3-4b")
    with pytest.raises(ConfigError, match=r"of type 'bloom'"):
        from_hf({"model_type": "bloom"})
    with pytest.raises(ConfigError, match=r"has no num_attention_heads"):
        from_hf({"model_type": "qwen3"})
    with pytest.raises(ConfigError, match=r"does not give vocab_size"):
        from_hf({**QWEN3_4B, "vocab_size": "many"})


def test_the_rope_of_older_and_newer_configs_is_one() -> None:
    scaling = {"factor": 8.0, "original_max_position_embeddings": 8192, "high_freq_factor": 4.0}
    old = {**QWEN3_4B, "rope_scaling": {"type": "llama3", **scaling}}
    new = {k: v for k, v in QWEN3_4B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 1000000, **scaling}
    assert from_hf(old) == from_hf(new)
    assert isinstance(from_hf(new), Architecture)
    assert not list(differences(from_hf(new), from_hf(old)))
