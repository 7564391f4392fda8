"""Engines of SGLang in ways that need a real server: deterministic, started by others, on two GPUs.

Run on a machine with a GPU and the extra `gpu`; skipped elsewhere.
"""

import asyncio
import importlib.util
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_servers import SERVER
from real_runs import REPO, Sluice

from rlcore.engine.launch import EngineProcess
from rlcore.engine.options import check_options
from rlcore.engine.sglang import DETERMINISTIC_ENV, sglang_argv
from rlcore.errors import ConfigError
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

Start = Callable[..., tuple[EngineProcess, Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server of a tiny model with random weights, with more arguments."""
    made: list[EngineProcess] = []

    def one(
        tp: int = 1, env: dict[str, str] | None = None, **more: Any
    ) -> tuple[EngineProcess, Path]:
        build = runpy.run_path(str(REPO / "tests" / "contract" / "tiny_model.py"))["build"]
        model = build(tmp_path / "model", head_dim=64)
        port = free_port()
        engine = EngineProcess(port)
        made.append(engine)
        engine.start(
            sglang_argv(model, port, tp=tp, dtype="bfloat16", extra=SERVER | more),
            tmp_path / "engine.log",
            env,
        )
        engine.wait_healthy(400)
        return engine, model

    yield one
    for engine in made:
        engine.stop()


async def answers(url: str, seeds: list[int]) -> list[list[int]]:
    """Tokens for one prompt by seed."""
    params = {"temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True}
    requests = [GenerateRequest([5, 6, 7, 8], params | {"sampling_seed": s}) for s in seeds]
    async with EngineClient(url, Limits(2000, 8192)) as client:
        return [result.tokens for result in await client.generate(requests)]


def test_arguments_are_those_of_the_installed_server() -> None:
    check_options({**SERVER, "cuda_graph_bs_decode": [8, 64], "enable_dp_attention": True})
    with pytest.raises(ConfigError, match=r"did you mean sglang\.mem_fraction_static"):
        check_options({"mem_fraction_statik": 0.2})


def test_deterministic_inference_gives_the_same_tokens_in_any_company(start: Start) -> None:
    engine, _ = start(env=DETERMINISTIC_ENV, enable_deterministic_inference=True)
    seeds = list(range(40))
    together = asyncio.run(answers(engine.url, seeds))
    assert asyncio.run(answers(engine.url, seeds)) == together
    alone = [asyncio.run(answers(engine.url, [seed]))[0] for seed in seeds[:4]]
    assert alone == together[:4]
    assert len({tuple(tokens) for tokens in together}) > 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU; this needs two")
def test_a_layer_may_be_cut_over_two_gpus(start: Start) -> None:
    engine, _ = start(tp=2)
    [tokens] = asyncio.run(answers(engine.url, [1]))
    assert len(tokens) == 32


def test_a_run_trains_with_a_server_that_somebody_else_started(tmp_path: Path) -> None:
    build = runpy.run_path(str(REPO / "examples" / "quickstart" / "model.py"))["build"]
    build(tmp_path / "other", 99)
    port = free_port()
    engine = EngineProcess(port)
    argv = sglang_argv(tmp_path / "other", port, dtype="bfloat16", context_length=64, extra=SERVER)
    engine.start(argv, tmp_path / "engine.log")
    try:
        engine.wait_healthy(400)
        (tmp_path / "run.toml").write_text(
            f'extends = "{REPO}/examples/quickstart/run.toml"\n'
            f'[rollout]\nengine = "sglang"\ncontext_length = 64\nengine_urls = ["{engine.url}"]\n'
            '[cluster]\ndevice = "cuda"\n[train]\nnum_iterations = 6\n'
        )
        sluice = Sluice(tmp_path / "root", cwd=tmp_path)
        sluice("train", str(tmp_path / "run.toml"), "--run-id", "theirs", timeout=900)
        assert engine.alive()
    finally:
        engine.stop()
    metrics = sluice.json("show", "theirs")["metrics"]
    print("canary", [m["sync/canary_abs_diff"] for m in metrics])
    print("gap", [m["train/train_rollout_logprob_abs_diff"] for m in metrics])
    assert len(metrics) == 6
    assert max(m["sync/canary_abs_diff"] for m in metrics) < 0.05
    assert sluice.json("verify", "theirs")["ok"]
