"""The attempts of a flow run: how often it may crash, and that one process alone drives."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.operation import attempts as attempts_module
from flows.operation.attempts import Attempts
from rlcore.config import RunConfig, load_config
from rlcore.opening import open_store, put_outcome
from rlcore.store.lease import Lease, process_name

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "run.toml"
FLOW, OTHER = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(QUICKSTART, [f"storage.root='{tmp_path}'", "run.id=r", "run.max_attempts=2"])


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_they_count_until_a_commit_or_a_word(config: RunConfig) -> None:
    store = open_store(config)
    store.create_run({"config": {}, "config_digest": "0", "code": "", "parent": None})
    lease = Lease.acquire(store.objects, "r")
    assert [Attempts(config, FLOW).count() for _ in range(2)] == [1, 2]
    assert Attempts(config, OTHER).count() == 1
    record = {"run_id": "r", "iteration": 0, "stages": {}, "metrics": {}}
    store.commit_iteration(0, record, lease)
    assert Attempts(config, FLOW).count() == 1
    assert Attempts(config, FLOW).count() == 2
    Attempts(config, FLOW).forget()
    assert Attempts(config, FLOW).count() == 1


def test_too_many_are_said(config: RunConfig) -> None:
    assert Attempts(config, FLOW).too_many(2) is None
    said = Attempts(config, FLOW).too_many(3)
    assert said is not None and "crashed 2 times" in said and "run.max_attempts = 2" in said


def test_a_process_of_the_same_flow_run_that_drives_is_known(
    config: RunConfig, other_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(config), process_name(other_process.pid)
    mine = Attempts(config, FLOW)
    assert not mine.another_drives()
    lease = Lease.acquire(store.objects, "r", holder=other)
    # So far it may be any driver, such as the command line.
    assert not mine.another_drives()
    with monkeypatch.context() as patch:
        patch.setattr(attempts_module, "this_process", lambda: other)
        Attempts(config, FLOW)
    assert mine.another_drives()
    assert not Attempts(config, OTHER).another_drives()
    lease.release()
    assert not mine.another_drives()


async def test_whoever_stood_by_ends_as_the_other_did_or_takes_over(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(config)
    store.create_run({"config": {}, "config_digest": "0", "code": "", "parent": None})
    lease = Lease.acquire(store.objects, "r")
    lease.release()
    drives = iter([True, False] * 3)
    monkeypatch.setattr(Attempts, "another_drives", lambda self: next(drives))
    monkeypatch.setattr(attempts_module, "WATCH_INTERVAL_S", 0.01)
    ends = {"failed": "FAILED", "cancelled": "CANCELLED", "interrupted": None}
    for status, expected in ends.items():
        put_outcome(store, config, status, "why", lease.epoch)
        end = await Attempts(config, FLOW).stand_by(lambda: False)
        assert (None if end is None else end.type.value) == expected
