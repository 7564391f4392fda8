"""A run of a mixture of experts: engine and trainer hold the same weights, and the store says how
experts were used.
"""

from pathlib import Path

import pytest
from real_runs import REPO, Sluice, short

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


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_engine_and_trainer_agree_after_each_sync(
    sluice: Sluice, tmp_path: Path, transport: str
) -> None:
    build = tmp_path / "moe.py"
    build.write_text(BUILD.format(quickstart=str(REPO / "examples" / "quickstart")))
    config = short(tmp_path, iterations=2)
    sets = [f"model.build={build}:build", f"weights.transport={transport}"]
    options = [word for one in sets for word in ("--set", one)]
    sluice("train", str(config), "--run-id", "moe", *options)
    metrics = sluice.json("show", "moe")["metrics"]
    for one in metrics:
        assert one["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert one["moe/load_max"] >= 1 and one["moe/layer_1/dead_experts"] <= 1
    assert sluice.json("verify", "moe")["ok"]
