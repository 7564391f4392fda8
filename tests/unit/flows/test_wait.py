"""How `sluice wait` decides that a run has ended."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.commands.wait import ENDINGS, FlowRunSeen, Seen, is_of, look, wait_for_run, watch
from flows.exit_codes import BAD_INPUT, CANCELLED, CRASHED, DONE, FAILED, TIMEOUT
from rlcore.store.lease import Lease
from rlcore.store.manifest import canonical_json
from rlcore.store.objects import Objects
from rlcore.store.paths import outcome_key
from rlcore.store.run_store import RunStore


def played(*states: Seen) -> Callable[[], Seen]:
    """A run that is in these states one after another, and stays in the last."""
    left: Iterator[Seen] = iter(states)
    last = [states[-1]]

    def look() -> Seen:
        return next(left, last[0])

    return look


def ended(*states: Seen, asks: list[FlowRunSeen | None] | None = None, **more: float) -> Seen:
    answers = iter(asks or [])
    return watch(
        played(*states),
        lambda: next(answers, None),
        more.get("timeout_s"),
        None,
        poll_s=0.001,
        grace_s=more.get("grace_s", 0.05),
    )


def test_exit_codes_tell_endings_apart() -> None:
    assert ENDINGS["completed"] == DONE == 0
    codes = [FAILED, BAD_INPUT, CRASHED, CANCELLED, TIMEOUT]
    assert sorted(ENDINGS.values()) == sorted([DONE, *codes])


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_an_ending_that_the_store_knows(status: str) -> None:
    assert ended(Seen("running", 1, 3), Seen(status, 2, 3, "why")) == Seen(status, 2, 3, "why")


def test_a_crash_is_one_after_a_while_and_not_before() -> None:
    began = time.monotonic()
    assert ended(Seen("running", 1, 3), Seen("interrupted", 1, 3)).status == "crashed"
    assert time.monotonic() - began > 0.05
    back = ended(Seen("interrupted", 1, 3), Seen("running", 1, 3), Seen("completed", 3, 3))
    assert back.status == "completed"


def test_a_run_that_prefect_starts_again_has_not_ended() -> None:
    again = FlowRunSeen("SCHEDULED", "AwaitingRetry", "")
    seen = ended(
        Seen("failed", 1, 3),
        Seen("interrupted", 1, 3),
        Seen("running", 1, 3),
        Seen("completed", 3, 3),
        asks=[again, again],
        grace_s=0.0,
    )
    assert seen.status == "completed"


def test_a_flow_run_that_failed_before_it_opened_the_run() -> None:
    failed = FlowRunSeen("FAILED", "Failed", "unknown setting")
    seen = ended(Seen("missing"), asks=[failed] * 10_000)
    assert (seen.status, seen.message) == ("failed", "unknown setting")


def test_a_name_that_nobody_knows() -> None:
    assert ended(Seen("missing", message="no run x")).status == "unknown"
    never = ended(Seen("new", 3, 9))
    assert (never.status, never.committed) == ("unknown", 3) and "sluice resume" in never.message


def test_time_is_over() -> None:
    seen = ended(Seen("running", 1, 3), timeout_s=0.02)
    assert (seen.status, seen.committed) == ("timeout", 1)


def test_flow_runs_are_told_by_name_or_by_what_they_were_asked_for() -> None:
    assert is_of("a", "train-a", "1", {})
    assert is_of("a", "brave-hare", "1", {"overrides": {"run.id": "a"}})
    assert is_of("a", "brave-hare", "1", {"overrides": {"run": {"id": "a"}}})
    assert is_of("a", "brave-hare", "1", {"config": {"run": {"id": "a"}}, "overrides": {}})
    assert not is_of("b", "brave-hare", "1", {"config": {"run": {"id": "a"}}, "overrides": None})
    assert is_of("run-1", "brave-hare", "1", {"config": {"run": {"id": ""}}})


def test_what_the_store_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = Objects.open(str(tmp_path))
    assert look(objects, "gone").status == "missing"
    store = RunStore(objects, "r")
    config = {"train": {"num_iterations": 3}}
    store.create_run({"config": config, "config_digest": "0", "code": "", "parent": None})
    assert look(objects, "r").status == "new"
    lease = Lease.acquire(objects, "r")
    assert look(objects, "r").status == "running"
    lease.release()
    for status in ("cancelled", "failed"):
        record = {"schema_version": 1, "status": status, "message": "m", "epoch": 1}
        objects.put(outcome_key("r"), canonical_json(record))
        assert look(objects, "r") == Seen(status, 0, 3, "m")
    assert wait_for_run(str(tmp_path), "r", timeout_s=5, as_json=False) == FAILED
    assert "failed, 0/3: m" in capsys.readouterr().out
    # One that was asked for a single iteration waits for the next one to be asked for.
    record = {"schema_version": 1, "status": "completed", "message": "", "epoch": 1}
    objects.put(outcome_key("r"), canonical_json(record))
    assert look(objects, "r").status == "running"
