"""What only a GPU shows of mixtures of experts and of fp8: a real SGLang server's answers, runs.

Run on a machine with a GPU and the extra `gpu`; skipped elsewhere. The model is tiny and random,
its sizes multiples of 128, which fp8 kernels need.
"""

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_servers import SERVER
from real_runs import REPO, Sluice

from rlcore.conversion.fp8 import hf_to_fp8
from rlcore.engine.launch import EngineProcess
from rlcore.engine.sglang import sglang_argv
from rlcore.net import free_port
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.rollout.limits import Limits

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not there"),
]

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
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    space: dict[str, Any] = {}
    exec(BUILD.format(quickstart=str(REPO / "examples" / "quickstart")), space)
    space["build"](folder / "plain", 0)
    hf_to_fp8(folder / "plain", folder / "fp8")
    return folder


@pytest.fixture
def url(model: Path, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    engine = EngineProcess(port)
    more = {**SERVER, "enable_return_routed_experts": True}
    engine.start(sglang_argv(model / "plain", port, extra=more), tmp_path / "engine.log")
    try:
        engine.wait_healthy(400)
        yield engine.url
    finally:
        engine.stop()


def test_a_real_server_tells_the_experts_of_all_tokens_but_the_last(url: str, model: Path) -> None:
    prompts, params = [[10, 14], [5, 6, 7, 8, 9]], {"max_new_tokens": 6, "ignore_eos": True}

    async def ask() -> list[Any]:
        requests = [GenerateRequest(p, params, routed_experts=True) for p in prompts]
        async with EngineClient(url, Limits.of_model(model / "plain")) as client:
            return await client.generate(requests)

    agree = []
    for prompt, result in zip(prompts, asyncio.run(ask()), strict=True):
        assert result.routed_experts.shape == (len(prompt) + 5, 3, 2)
        ours = chosen(model / "plain", prompt + result.tokens[:-1])
        agree.append(np.mean(np.sort(result.routed_experts, axis=2) == ours))
    print("share of choices that are also those of transformers in bfloat16:", agree)
    assert min(agree) > 0.8


def chosen(folder: Path, ids: list[int]) -> Any:
    """[tokens, layers, k], sorted, by transformers."""
    from transformers import AutoModelForCausalLM

    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    out = lm(torch.tensor([ids], device="cuda"), output_router_logits=True, use_cache=False)
    layers = [logits.float().topk(2).indices.sort().values for logits in out.router_logits]
    return torch.stack(layers, 1).cpu().numpy()


@pytest.mark.parametrize("how", ["experts", "fp8-disk"])
def test_a_run_trains(model: Path, tmp_path: Path, how: str) -> None:
    """The gap between engine and trainer is printed; replayed experts have to be the stored ones,
    or training would have ended with an error.
    """
    sluice, config = Sluice(tmp_path / "root", cwd=tmp_path), REPO / "examples/quickstart/gpu.toml"
    sets = [f"model.path={model / 'plain'}", "model.build=", "train.num_iterations=6"]
    if how == "experts":
        sets += ["rollout.use_rollout_routing_replay=true"]
    else:
        sets += [f"rollout.hf_checkpoint={model / 'fp8'}", "weights.transport=disk"]
        sets += ["weights.canary_tolerance=0.3"]
    options = [word for one in sets for word in ("--set", one)]
    print(sluice("train", str(config), "--run-id", "moe", *options, timeout=900))
    metrics = sluice.json("show", "moe")["metrics"]
    for name in ("train/train_rollout_logprob_abs_diff", "sync/canary_abs_diff", "seconds"):
        print(name, [round(m[name], 5) for m in metrics])
    assert len(metrics) == 6 and sluice.json("verify", "moe")["ok"]
    if how == "experts":
        query = "select count(*) n from samples where len(routed_experts) != 6 * (len(tokens) - 1)"
        assert sluice.json("sql", query) == [{"n": 0}]
