"""Engines that give their memory back, as the driver sees them: a real server under Ray."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from rlcore.cluster import ray_session
from rlcore.cluster.engine_actor import EngineSpec
from rlcore.cluster.engines import MEMORY, WEIGHTS, Engines
from rlcore.cluster.placement import NOWHERE
from rlcore.errors import EngineError


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    import ray

    mine = ray_session.connect("local")
    yield
    if mine:
        ray.shutdown()


def status(engines: Engines) -> int:
    """Of a short generation."""
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    return httpx.post(f"{engines.urls[0]}/generate", json=body, trust_env=False).status_code


def pid_of(url: str) -> int:
    """The server that listens there."""
    port = int(url.rsplit(":", 1)[1])
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    [pid] = [c.pid for c in listening if c.laddr.port == port]
    assert pid is not None
    return pid


def test_an_engine_that_dies_with_its_memory_given_back_comes_again(
    ray: None, model_folder: Path, tmp_path: Path
) -> None:
    asyncio.run(give_back_and_die(Engines(spec(model_folder, tmp_path), [[NOWHERE]])))


def spec(model: Path, folder: Path) -> EngineSpec:
    return EngineSpec(
        engine="embedded", model_path=str(model), log_dir=str(folder), releases_memory=True
    )


async def give_back_and_die(engines: Engines) -> None:
    nothing: frozenset[str] = frozenset()
    await engines.start()
    try:
        update = {"model_path": engines._spec.model_path, "weight_version": "1"}
        await engines.release(MEMORY)
        assert status(engines) == 200, "nothing was asked for"
        for _ in range(2):
            await engines.release(nothing)
        assert status(engines) == 503
        assert await engines.mend(released=False) == []
        for _ in range(2):
            await engines.resume(WEIGHTS)
        await engines.release(WEIGHTS)
        reply = httpx.post(
            f"{engines.urls[0]}/update_weights_from_disk", json=update, trust_env=False
        )
        assert reply.status_code == 200, reply.text
        await engines.resume(MEMORY)
        assert status(engines) == 200
        assert await engines.mend(released=False) == []

        await engines.release(nothing)
        os.kill(pid_of(engines.urls[0]), signal.SIGKILL)
        assert await engines.mend(released=False) == [], "there is no room for it yet"
        with pytest.raises(EngineError, match="resume_memory_occupation did not answer"):
            await engines.resume(WEIGHTS)
        await engines.release(nothing)
        with pytest.raises(EngineError, match=r"engine 0 .* is down"):
            await engines.resume(WEIGHTS)
        assert await engines.mend() == engines.urls
        assert status(engines) == 200
        assert engines.restarts == 1
    finally:
        engines.end()
