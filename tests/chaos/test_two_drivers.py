"""Two drivers on one run: one works, the other says who does, and nothing is done twice."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import psutil
import pytest
from chaos_runs import Calm, outcome, tiny
from real_runs import Sluice, wait_for
from s3_servers import seaweed_server

from rlcore.store.lease import read_lease
from rlcore.store.objects import Objects
from rlcore.store.paths import committed_key
from rlcore.store.run_store import RunStore

PATIENCE_S = 240


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.chaos)])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sluice]:
    """The command, with an empty root on a disk or an S3 server."""
    if request.param == "file":
        yield Sluice(tmp_path / "root", cwd=tmp_path)
        return
    (tmp_path / "weed").mkdir()
    with seaweed_server(tmp_path / "weed") as server:
        monkeypatch.setitem(fsspec.config.conf, "s3", server.conf)
        yield Sluice("s3://runs/two", cwd=tmp_path, env=server.env(tmp_path / "home"))


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out + err


def committed(place: Sluice, iteration: int) -> bool:
    return Objects.open(str(place.root)).exists(committed_key("two", iteration))


def epochs(place: Sluice) -> list[int]:
    """The lease epochs of all manifests, in the order of their stages."""
    store = RunStore(Objects.open(str(place.root)), "two")
    found: list[Any] = [
        store.stage(i, stage)
        for i in range(3)
        for stage in ("rollout", "reward", "filter", "train", "weight_sync", "evaluate")
    ]
    return [manifest.epoch for manifest, _ in found]


@pytest.mark.timeout(600)
def test_of_two_started_together_one_trains(place: Sluice, tmp_path: Path, calm: Calm) -> None:
    config = tiny(tmp_path)
    both = [place.start("train", str(config), "--run-id", "two") for _ in range(2)]
    ends = sorted(finish(process) for process in both)
    assert [code for code, _ in ends] == [0, 1], ends
    said = ends[1][1]
    assert "run two is held by" in said and "stop that driver first" in said, said
    assert "Traceback" not in said
    assert set(epochs(place)) == {1}
    assert outcome(place.root, "two") == calm.outcome


@pytest.mark.timeout(600)
def test_a_driver_that_slept_through_a_takeover_is_fenced(
    place: Sluice, tmp_path: Path, calm: Calm
) -> None:
    config = tiny(tmp_path, more="[storage]\nlease_ttl_s = 4")
    sleeper = place.start("train", str(config), "--run-id", "two")
    wait_for(lambda: committed(place, 0), PATIENCE_S)
    os.kill(sleeper.pid, signal.SIGSTOP)
    try:
        heir = _resume_once_free(place)
        wait_for(lambda: committed(place, 1) or heir.poll() is not None, PATIENCE_S)
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
    helpers = psutil.Process(sleeper.pid).children(recursive=True)
    code, said = finish(sleeper)
    assert code == 1, said
    assert "(epoch 2) and no longer by" in said and "this driver must end" in said, said
    assert finish(heir)[0] == 0
    seen = epochs(place)
    assert seen == sorted(seen) and set(seen) == {1, 2}
    assert outcome(place.root, "two") == calm.outcome
    _, alive = psutil.wait_procs(helpers, timeout=20)
    assert not alive


def _resume_once_free(place: Sluice) -> "subprocess.Popen[str]":
    """The driver that takes over: refused for as long as the lease of the other lasts."""
    objects = Objects.open(str(place.root))
    while True:
        heir = place.start("resume", "two")
        while heir.poll() is None:
            if (held := read_lease(objects, "two")) and held["epoch"] == 2:
                return heir
            time.sleep(0.05)
        out, err = heir.communicate()
        assert heir.returncode == 1 and "run two is held by" in out + err, out + err
