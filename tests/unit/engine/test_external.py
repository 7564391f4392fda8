"""An engine that somebody else started, as the actor that watches it sees it."""

import runpy
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rlcore.cluster.engine_actor import EngineSpec
from rlcore.cluster.external_engine import ExternalEngine
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.errors import EngineError
from rlcore.net import free_port

CONTRACT = Path(__file__).parents[2] / "contract"


def spec(url: str, **settings: object) -> EngineSpec:
    told = {"start_timeout_s": 60.0, "check_timeout_s": 10.0} | settings
    return EngineSpec("embedded", "/nowhere", "/nowhere", urls=(url,), **told)  # type: ignore[arg-type]


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[tuple[EngineProcess, Path, list[str]]]:
    """A running engine, its model, and its command."""
    model = runpy.run_path(str(CONTRACT / "tiny_model.py"))["build"](tmp_path / "model")
    engine = EngineProcess(free_port())
    argv = embedded_argv(model, int(engine.url.rpartition(":")[2]))
    engine.start(argv, tmp_path / "engine.log")
    try:
        engine.wait_healthy(120)
        yield engine, model, argv
    finally:
        engine.stop()


def test_it_is_watched_waited_for_and_never_ended(
    theirs: tuple[EngineProcess, Path, list[str]], tmp_path: Path
) -> None:
    engine, model, argv = theirs
    watched = ExternalEngine(spec(engine.url), 0)
    assert watched.start("0", None, None) == engine.url
    assert watched.probe(10) is None
    body = {"model_path": str(model), "weight_version": "3"}
    assert httpx.post(f"{engine.url}/update_weights_from_disk", json=body).status_code == 200
    assert watched.probe(10) is None

    # Started anew by those whose it is, it has lost what the run gave it.
    engine.stop()
    assert "did not answer /health" in str(watched.probe(1))
    engine.start(argv, tmp_path / "engine.log")
    engine.wait_healthy(120)
    assert "weight version 'default' after '3': it was started anew" in str(watched.probe(10))
    assert watched.start("0", None, None) == engine.url
    assert watched.probe(10) is None
    watched.stop()
    assert engine.alive()


def test_another_number_of_gpus_is_named(theirs: tuple[EngineProcess, Path, list[str]]) -> None:
    watched = ExternalEngine(spec(theirs[0].url, gpus=2), 0)
    with pytest.raises(EngineError, match=r"has 1 GPUs.*rollout_num_gpus_per_engine = 2"):
        watched.start("0", None, None)


def test_an_engine_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    watched = ExternalEngine(spec(url, start_timeout_s=0.2), 0)
    with pytest.raises(EngineError, match=rf"{url} \(rollout\.engine_urls\) did not answer"):
        watched.start("0", None, None)
