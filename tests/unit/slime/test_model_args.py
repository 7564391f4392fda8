"""MODEL_ARGS of slime's scripts: held against a preset, or against the checkpoint's config.json."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.models.presets import preset_names, read_preset
from rlcore.slime.architecture import NUMBERS, layer_pattern, match_architecture
from rlcore.slime.translate import read, translate

COMMON = "--swiglu --disable-bias-linear --normalization RMSNorm"
QWEN3_4B = (
    f"{COMMON} --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --use-rotary-position-embeddings "
    "--norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm"
)
GLM45_AIR = (
    f"{COMMON} --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --num-attention-heads 96 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --vocab-size 151552 "
    "--rotary-base 1000000 --rotary-percent 0.5 --untie-embeddings-and-output-weights "
    "--add-qkv-bias --position-embedding-type rope --num-experts 128 --moe-ffn-hidden-size 1408 "
    "--moe-shared-expert-intermediate-size 1408 --moe-router-topk 8 --moe-router-pre-softmax "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-layer-freq [0]*1+[1]*45 --moe-grouped-gemm --moe-router-dtype fp32"
)
MOONLIGHT = (
    f"{COMMON} --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16 "
    "--kv-channels 128 --vocab-size 163840 --norm-epsilon 1e-5 --rotary-base 50000 "
    "--rotary-percent 1.0 --untie-embeddings-and-output-weights --qk-layernorm "
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --rotary-scaling-factor 1 --mscale 1.0 --mscale-all-dim 1.0 "
    "--num-experts 64 --moe-layer-freq [0]*1+[1]*26 --moe-ffn-hidden-size 1408 "
    "--moe-router-topk 6 --moe-shared-expert-intermediate-size 2816 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-group-topk 1 --moe-router-num-groups 1 --moe-router-topk-scaling-factor 2.446"
)


def flags(line: str) -> dict[str, Any]:
    wrong: list[str] = []
    given = {argument.name: value for argument, value, _ in read(shlex.split(line), wrong)}
    assert wrong == []
    return given


NOWHERE = Path("/no/such/folder")


@pytest.mark.parametrize(
    ("line", "preset"),
    [(QWEN3_4B, "qwen3-4B"), (GLM45_AIR, "glm4.5-106B-A12B"), (MOONLIGHT, "moonlight")],
)
def test_the_arguments_of_a_script_are_its_preset(line: str, preset: str) -> None:
    assert match_architecture(flags(line), NOWHERE) == preset


def test_numbers_of_every_preset_lead_back_to_it_or_to_its_twin() -> None:
    for name in preset_names():
        arch = read_preset(name).architecture
        given = {flag: getattr(arch, field) for flag, field in NUMBERS.items()}
        found = match_architecture({k: v for k, v in given.items() if k != "num-layers"}, NOWHERE)
        assert found is None  # not the whole of it
        assert all(field in type(arch).model_fields for field in NUMBERS.values())


def test_a_flag_that_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--hidden-size 2561: the nearest preset, qwen3-4B, has"):
        match_architecture(flags(QWEN3_4B.replace("2560", "2561")), NOWHERE)
    with pytest.raises(ConfigError, match=r"no --qk-layernorm: the nearest preset, qwen3-4B"):
        match_architecture(flags(QWEN3_4B.replace("--qk-layernorm", "")), NOWHERE)
    with pytest.raises(ConfigError, match=r"--moe-layer-freq \[0\]\*2\+\[1\]\*44: .* = 1"):
        match_architecture(flags(GLM45_AIR.replace("[0]*1+[1]*45", "[0]*2+[1]*44")), NOWHERE)


def test_the_checkpoint_says_more_than_any_preset(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
        "--num-query-groups 2 --kv-channels 16 --vocab-size 96 --qk-layernorm"
    )
    assert match_architecture(flags(line), tmp_path) is None
    with pytest.raises(ConfigError, match=r"--num-layers 3: .*config.json has num_hidden_layers"):
        match_architecture(flags(line.replace("layers 2", "layers 3")), tmp_path)
    with pytest.raises(ConfigError, match=r"--add-qkv-bias: .*config.json has no such thing"):
        match_architecture(flags(f"{line} --add-qkv-bias"), tmp_path)


def test_a_launch_line_names_its_preset_and_may_leave_the_architecture_out() -> None:
    rest = (
        "--hf-checkpoint /no/such/folder --prompt-data /p.jsonl --num-rollout 7 "
        "--rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 64 "
        "--custom-rm-path rm.py:f --rollout-num-gpus 2"
    )
    model = translate(shlex.split(f"{QWEN3_4B} {rest}")).tree["model"]
    assert model == {"path": "/no/such/folder", "preset": "qwen3-4B"}
    assert "preset" not in translate(shlex.split(rest)).tree["model"]


def test_patterns_of_layers() -> None:
    assert layer_pattern("[0]*1+[1]*2", 3) == layer_pattern("([0]*1 + [1]*2)", 3) == [0, 1, 1]
    assert layer_pattern("[0,1]", 2) == [0, 1] and layer_pattern("2", 4) == [1, 0, 1, 0]
    for wrong in ("some", "[0]*x", "0"):
        with pytest.raises(ConfigError, match="it is written as"):
            layer_pattern(wrong, 2)
