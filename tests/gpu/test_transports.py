"""Weights by each transport into a real SGLang server: colocated on one GPU, and across two."""

import asyncio
import importlib.util
import runpy
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_runs import REPO

from rlcore.config.algorithm import AlgorithmConfig
from rlcore.config.tree import TrainConfig
from rlcore.engine.launch import EngineProcess, visible_gpu
from rlcore.engine.sglang import sglang_argv
from rlcore.net import free_port
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.weights.sync import SyncSpec, WeightSync

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not there"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

VOCABULARY, CONTEXT = 2000, 8192
TOLERANCE = 0.05
LONG = 3000
SERVER = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    "mem_fraction_static": 0.15,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one shape: the trainer's, and another for engines to begin with."""
    build = runpy.run_path(str(REPO / "tests" / "contract" / "tiny_model.py"))["build"]
    folder = tmp_path_factory.mktemp("models")
    return {
        name: build(folder / name, seed, context_length=CONTEXT, head_dim=64)
        for seed, name in enumerate(("trained", "other"))
    }


@contextmanager
def serving(model: Path, gpu: int, folder: Path, **more: Any) -> Iterator[str]:
    """A server on one GPU, with more arguments."""
    port = free_port()
    engine = EngineProcess(port)
    argv = sglang_argv(model, port, dtype="bfloat16", extra=SERVER | more)
    engine.start(argv, folder / "engine.log", {"CUDA_VISIBLE_DEVICES": visible_gpu(gpu)})
    try:
        engine.wait_healthy(400)
        yield engine.url
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def near(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on the trainer's GPU."""
    with serving(models["other"], 0, tmp_path_factory.mktemp("near")) as url:
        yield url


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path]) -> Iterator[Any]:
    """A trainer of one rank in this process, on the first GPU."""
    from rlcore.train.fsdp.trainer import FsdpTrainer
    from rlcore.train.ranks import one_rank

    torch.cuda.set_device(0)
    with one_rank("cuda"):
        train = TrainConfig(precision="bfloat16", torch_compile=False)
        made = FsdpTrainer(train, AlgorithmConfig(), temperature=1.0, seed=0, device="cuda")
        made.load(models["trained"], "start")
        yield made


def change(trainer: Any) -> None:
    """Every weight a little, far beyond the tolerance of the canary."""
    with torch.no_grad():
        for _, parameter in trainer._held()[0].weights():
            local = parameter.to_local()
            local += 0.05 * torch.randn_like(local)


def spec(url: str, model: Path, transport: Any, version: str, scratch: Path) -> SyncSpec:
    return SyncSpec(
        urls=(url,),
        version=version,
        transport=transport,
        dtype="bfloat16",
        model_folder=model,
        scratch=scratch,
        canary_prompts=4,
        canary_tolerance=TOLERANCE,
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        starts=(1,),
        on_gpus=True,
        # Several buckets.
        bucket_bytes=128 * 1024,
    )


def version_of(url: str) -> str:
    async def read() -> str:
        async with EngineClient(url) as client:
            return await client.weight_version()

    return asyncio.run(read())


def check_syncs(trainer: Any, url: str, model: Path, transport: str, folder: Path) -> None:
    """Two syncs of different weights: the canary holds after each."""
    sync = WeightSync(0)
    try:
        for turn in range(2):
            change(trainer)
            wanted = spec(url, model, transport, f"{transport}-{turn}", folder)
            report = sync.run(trainer, wanted)
            assert report is not None and version_of(url) == f"{transport}-{turn}"
            print(transport, turn, report.metrics)
            assert report.metrics["canary_abs_diff"] < TOLERANCE
    finally:
        sync.close()


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_an_engine_on_the_trainers_gpu_holds_its_weights(
    trainer: Any, near: str, models: dict[str, Path], transport: str, tmp_path: Path
) -> None:
    check_syncs(trainer, near, models["trained"], transport, tmp_path)


@TWO
def test_an_engine_on_another_gpu_holds_the_weights_that_were_broadcast(
    trainer: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    with serving(models["other"], 1, tmp_path) as url:
        check_syncs(trainer, url, models["trained"], "distributed", tmp_path)


def test_a_request_in_flight_goes_on_with_the_new_weights(
    trainer: Any, near: str, models: dict[str, Path], tmp_path: Path
) -> None:
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        params = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 1.0}
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": params, "return_logprob": True}
        answers.append(httpx.post(f"{near}/generate", json=body, timeout=300).json())

    sync = WeightSync(0)
    try:
        request = threading.Thread(target=ask)
        request.start()
        while request.is_alive() and not httpx.get(f"{near}/get_load").json()[0]["num_reqs"]:
            time.sleep(0.01)
        change(trainer)
        wanted = spec(near, models["trained"], "tensor", "in-flight", tmp_path)
        report = sync.run(trainer, replace(wanted, pause_mode="in_place"))
        under_way = request.is_alive()
        request.join(300)
    finally:
        sync.close()
    assert report is not None
    print("in flight", report.metrics)
    assert under_way, "the request had ended before the weights came: make it longer"
    [answer] = answers
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == LONG == len(answer["meta_info"]["output_token_logprobs"])
    assert answer["meta_info"]["weight_version"] == "in-flight"
    assert report.metrics["canary_abs_diff"] < TOLERANCE


def accepted(url: str) -> float:
    """Share of drafted tokens that the policy takes, greedily."""

    async def ask() -> Counter[str]:
        params = {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}
        requests = [GenerateRequest([5 + n, 6, 7, 8], params) for n in range(16)]
        async with EngineClient(url) as client:
            total = Counter[str]()
            for result in await client.generate(requests):
                total.update(result.speculation)
            return total

    found = asyncio.run(ask())
    return found["accept_token_num"] / found["draft_token_num"]


def test_a_draft_keeps_its_weights_while_the_policy_gets_new_ones(
    trainer: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    other = models["other"]
    draft = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(other),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    with serving(other, 0, tmp_path, **draft) as url:
        before = accepted(url)
        check_syncs(trainer, url, models["trained"], "tensor", tmp_path)
        after = accepted(url)
    print("accepted", before, after)
    assert before > 0.6, "the draft is the policy itself"
    assert after < before / 2, "the draft got the policy's new weights too"
