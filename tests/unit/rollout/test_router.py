"""Requests through a router's process to two embedded engines, with a stand-in for the package."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlcore.engine.launch import EngineProcess
from rlcore.errors import ConfigError, EngineError
from rlcore.net import free_port
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.router import Router, router_argv

STAND_IN = Path(__file__).parents[2] / "support" / "stand_in_router"
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6}
LIMITS = Limits(14, 32)
TIMEOUT_S = 60.0


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, for this process and those that it starts."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}:{Path(__file__).parents[3]}")


@pytest.fixture
def running(package: None, tmp_path: Path) -> Iterator[EngineProcess]:
    """A router that somebody else started, of no engines."""
    port = free_port()
    process = EngineProcess(port)
    process.start(router_argv(port, [], TIMEOUT_S), tmp_path / "theirs.log")
    process.wait_healthy(TIMEOUT_S)
    yield process
    process.stop()


def requests(n: int) -> list[GenerateRequest]:
    return [GenerateRequest([3 + k % 10, 13], PARAMS | {"sampling_seed": k}) for k in range(n)]


def served(router: str) -> dict[str, int]:
    found = httpx.get(f"{router}/workers", trust_env=False).json()["workers"]
    return {one["url"]: one["served"] for one in found}


async def generated(pool: EnginePool, n: int) -> list[list[int]]:
    return [result.tokens for result in await pool.generate(requests(n), group=2)]


async def test_answers_are_the_engines_own_and_all_else_goes_past_it(
    engines: list[EngineProcess], package: None, tmp_path: Path
) -> None:
    urls = [engine.url for engine in engines]
    async with EngineClient(urls[0], LIMITS) as direct:
        expected = [result.tokens for result in await direct.generate(requests(8))]
    router = Router(None, tmp_path / "router.log", TIMEOUT_S)
    await router.open(urls)
    pool = EnginePool(urls, LIMITS, router=router, patience_s=TIMEOUT_S)
    try:
        assert pool.address == router.url and pool.urls == urls
        assert await generated(pool, 8) == expected
        assert served(router.url) == dict.fromkeys(urls, 4)
        pool.version = "1"
        calls = asyncio.create_task(pool.generate(requests(2)))
        # Versions are asked of engines themselves: it waits until both hold the one wanted.
        while pool._takers[0].healthy:
            await asyncio.sleep(0.01)
        assert not calls.done()
        pool.version = "0"
        assert len(await calls) == 2
    finally:
        await pool.close()
        await router.close()


async def test_one_that_ended_is_started_again_at_its_address(
    engines: list[EngineProcess], package: None, tmp_path: Path
) -> None:
    urls = [engine.url for engine in engines]
    router = Router(None, tmp_path / "router.log", TIMEOUT_S)
    await router.open(urls)
    pool = EnginePool(urls, LIMITS, router=router, patience_s=TIMEOUT_S, pause_s=0.01)
    try:
        before, address = await generated(pool, 4), router.url
        assert router._process is not None
        router._process.stop()
        assert await generated(pool, 4) == before
        assert router.url == address
    finally:
        await pool.close()
        await router.close()


async def test_engines_are_announced_to_one_that_runs_and_taken_off(
    engines: list[EngineProcess], running: EngineProcess, tmp_path: Path
) -> None:
    urls = [engine.url for engine in engines]
    router = Router(running.url, tmp_path / "unused.log", TIMEOUT_S)
    await router.open(urls)
    # As a worker does that is started again.
    await router.open(urls)
    pool = EnginePool(urls, LIMITS, router=router)
    try:
        await generated(pool, 6)
        assert served(running.url) == dict.fromkeys(urls, 3)
    finally:
        await pool.close()
        await router.close()
    assert served(running.url) == {} and running.alive()


async def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    gone = Router(f"http://127.0.0.1:{free_port()}", tmp_path / "log", TIMEOUT_S)
    with pytest.raises(EngineError, match=r"rollout\.sglang_router_url: .* does not answer"):
        await gone.open(["http://127.0.0.1:1"])
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install sglang-router"):
        await Router(None, tmp_path / "log", TIMEOUT_S).open(["http://127.0.0.1:1"])
