"""The store fails under a run: a full disk, a server that is away, slow, cut off or behind."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest
from chaos_runs import Calm, outcome, tiny
from fault_proxy import Fault, Proxy, fault_proxy, mixed
from real_runs import Sluice, wait_for
from s3_servers import Server, seaweed_server

from rlcore.store.objects import Objects
from rlcore.store.paths import committed_key, manifest_key
from rlcore.store.run_store import RunStore

PATIENCE_S = 280


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all the space that is left, byte for byte."""
    with path.open("ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2


@pytest.mark.timeout(600)
def test_a_full_disk_ends_the_run_in_a_sentence_and_costs_nothing(
    small_disk: Path, tmp_path: Path, calm: Calm
) -> None:
    sluice = Sluice(small_disk / "root", cwd=tmp_path)
    process = sluice.start("train", str(tiny(tmp_path)), "--run-id", "full")
    wait_for(sluice.committed("full", 0).exists)
    until = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        fill(small_disk / "filler")
        assert time.monotonic() < until, "a full disk does not end the run"
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == 1, out + err
    said = " ".join(err.split("error: ")[-1].split())
    assert said.startswith(str(small_disk / "root")), err
    assert "No space left on device; check that the root" in said and "free space" in said, err
    assert "go on with: sluice resume full" in said and "Traceback" not in err, err
    # What was not committed is not believed, and nothing torn is among what was.
    assert not [p for p in (small_disk / "root" / "runs").rglob("*.json") if p.stat().st_size == 0]

    (small_disk / "filler").unlink()
    assert "3 iterations committed" in sluice("resume", "full")
    assert outcome(small_disk / "root", "full") == calm.outcome


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An S3 server that this process can read from directly."""
    (tmp_path / "weed").mkdir()
    with seaweed_server(tmp_path / "weed") as running:
        monkeypatch.setitem(fsspec.config.conf, "s3", running.conf)
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """What stands between a run and the server."""
    with fault_proxy(server.endpoint) as running:
        yield running


@pytest.fixture
def remote(server: Server, proxy: Proxy, tmp_path: Path) -> Sluice:
    """The command, with a root behind the proxy."""
    env = server.env(tmp_path / "home") | {"FSSPEC_S3_ENDPOINT_URL": proxy.endpoint}
    return Sluice("s3://runs/faulty", cwd=tmp_path, env=env)


def assert_one_driver_did_each_stage_once(run_id: str) -> None:
    """Nothing was restarted, and nothing made twice."""
    objects = Objects.open("s3://runs/faulty")
    store = RunStore(objects, run_id)
    for i in range(3):
        for stage in ("rollout", "reward", "filter"):
            found = store.stage(i, stage)
            assert found is not None and found[0].epoch == 1
            folder = manifest_key(run_id, i, stage).rpartition("/")[0]
            named = sorted(file.key for file in found[0].files)
            assert [k for k in objects.list(folder) if k.endswith(".parquet")] == named


def away(remote: Sluice, proxy: Proxy, config: Path, seconds: float) -> None:
    """Train while the server answers 503 for so long, from the middle of iteration 1 on."""
    process = remote.start("train", str(config), "--run-id", "away")
    objects = Objects.open("s3://runs/faulty")
    wait_for(lambda: objects.exists(committed_key("away", 0)), PATIENCE_S)
    proxy.unavailable_for(seconds)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    assert proxy.seen[Fault.UNAVAILABLE] > 3
    assert "trying again" in out + err
    assert_one_driver_did_each_stage_once("away")


@pytest.mark.timeout(600)
def test_a_store_that_is_away_for_seconds_costs_no_stage(
    remote: Sluice, proxy: Proxy, tmp_path: Path, calm: Calm
) -> None:
    away(remote, proxy, tiny(tmp_path), seconds=8)
    assert outcome("s3://runs/faulty", "away") == calm.outcome


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_store_that_is_away_for_a_minute_costs_no_iteration(
    remote: Sluice, proxy: Proxy, tmp_path: Path, calm: Calm
) -> None:
    away(remote, proxy, tiny(tmp_path), seconds=60)
    assert outcome("s3://runs/faulty", "away") == calm.outcome


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_network_that_loses_cuts_and_hangs_costs_no_stage(
    remote: Sluice, proxy: Proxy, tmp_path: Path, calm: Calm
) -> None:
    kinds = (Fault.UNAVAILABLE, Fault.CUT, Fault.LOSE)
    proxy.rule = mixed(seed=11, share=0.12, kinds=kinds, hangs=2)
    remote("train", str(tiny(tmp_path)), "--run-id", "bad", timeout=PATIENCE_S)
    assert all(proxy.seen[kind] for kind in (*kinds, Fault.HANG))
    assert_one_driver_did_each_stage_once("bad")
    assert outcome("s3://runs/faulty", "bad") == calm.outcome


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_store_that_stays_away_ends_the_run_which_goes_on_later(
    remote: Sluice, proxy: Proxy, tmp_path: Path, calm: Calm
) -> None:
    process = remote.start("train", str(tiny(tmp_path)), "--run-id", "gone")
    objects = Objects.open("s3://runs/faulty")
    wait_for(lambda: objects.exists(committed_key("gone", 0)), PATIENCE_S)
    proxy.rule = lambda _request: Fault.UNAVAILABLE
    began = time.monotonic()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - began < 75 + 60, "each part of the end waits for the store again"
    assert process.returncode == 1, out + err
    said = " ".join(err.split("error: ")[-1].split())
    assert said.startswith("s3://runs/faulty") and "did not answer for 75 s" in said, err
    proxy.rule = lambda _request: Fault.NONE
    remote("resume", "gone", timeout=PATIENCE_S)
    assert outcome("s3://runs/faulty", "gone") == calm.outcome
