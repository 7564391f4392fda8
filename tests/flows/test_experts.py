"""A run of a mixture of experts: engine and trainer hold the same weights, and the store says how
experts were used.
"""

from pathlib import Path

import pytest
from real_runs import REPO, Sluice, kill_tree, short, wait_for

BUILD = """
import sys

sys.path.append({quickstart!r})
from model import characters


def build(folder, seed):
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    names = {{"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters(), clean_up_tokenization_spaces=False, **names
    )
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
"""


def of_experts(folder: Path, *sets: str) -> list[str]:
    """Options of a run that trains such a model."""
    build = folder / "moe.py"
    build.write_text(BUILD.format(quickstart=str(REPO / "examples" / "quickstart")))
    return [word for one in (f"model.build={build}:build", *sets) for word in ("--set", one)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_engine_and_trainer_agree_after_each_sync(
    sluice: Sluice, tmp_path: Path, transport: str
) -> None:
    config = short(tmp_path, iterations=2)
    options = of_experts(tmp_path, f"weights.transport={transport}")
    sluice("train", str(config), "--run-id", "moe", *options)
    metrics = sluice.json("show", "moe")["metrics"]
    for one in metrics:
        assert one["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert one["moe/load_max"] >= 1 and one["moe/layer_1/dead_experts"] <= 1
    assert sluice.json("verify", "moe")["ok"]


@pytest.mark.slow
def test_replayed_experts_survive_a_kill(sluice: Sluice, tmp_path: Path) -> None:
    config = str(short(tmp_path, iterations=4, more="state_interval = 2"))
    replays = ("rollout.use_rollout_routing_replay=true", "train.use_routing_replay=true")
    options = of_experts(tmp_path, *replays)
    sluice("train", config, "--run-id", "calm", *options)
    process = sluice.start("train", config, "--run-id", "killed", *options)
    wait_for(sluice.committed("killed", 2).exists)
    kill_tree(process.pid)
    process.wait(10)
    sluice("resume", "killed")
    calm, killed = sluice.json("show", "calm"), sluice.json("show", "killed")
    assert killed["state_sha256"] == calm["state_sha256"]
    query = "select count(*) n from samples where len(routed_experts) = 2 * 2 * (len(tokens) - 1)"
    assert sluice.json("sql", query) == [{"n": 2 * 4 * 64}]
    assert sluice.json("verify", "killed")["ok"]


@pytest.mark.slow
def test_megatron_trains_through_the_experts_of_the_engine(sluice: Sluice, tmp_path: Path) -> None:
    config = str(short(tmp_path, iterations=2))
    replays = ("rollout.use_rollout_routing_replay=true", "train.use_routing_replay=true")
    options = of_experts(tmp_path, "train.backend=megatron", *replays)
    sluice("train", config, "--run-id", "megatron", *options)
    for one in sluice.json("show", "megatron")["metrics"]:
        assert one["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert one["moe/load_max"] >= 1 and one["moe/layer_1/dead_experts"] <= 1
    assert sluice.json("verify", "megatron")["ok"]
