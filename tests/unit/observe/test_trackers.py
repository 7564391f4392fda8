"""What trackers show is what the store says, once, after any number of drivers; and none of them
can end a run, hold it up, or keep another from its metrics.
"""

import logging
import math
import sys
import threading
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import SmallRun, config_tree
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlcore.config import RunConfig, build_config, config_digest
from rlcore.errors import ConfigError
from rlcore.observe import trackers
from rlcore.observe.aside import Aside, close_all
from rlcore.observe.boards import MLflow, TensorBoard, Tracker, Wandb, flat, mlflow_name
from rlcore.observe.history import iterations
from rlcore.observe.trackers import (
    check_trackers,
    open_trackers,
    tracked_id,
    wandb_arguments,
)
from rlcore.store.objects import Objects


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def config(root: Path | str, **tracking: Any) -> RunConfig:
    tree = config_tree("a") | {"tracking": tracking, "storage": {"root": str(root)}}
    return build_config(tree)


class Board:
    """Keeps what it is given; raises what it is told to."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.taken: list[tuple[int, Mapping[str, float]]] = []
        self.closed: bool | None = None
        self.raised = threading.Semaphore(0)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if self.errors:
            self.raised.release()
            raise self.errors.pop(0)
        self.taken.append((iteration, metrics))

    def close(self, *, failed: bool) -> None:
        self.closed = failed


# --- TensorBoard ----------------------------------------------------------------------------------


def test_what_is_logged_is_shown(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "a")
    board.log(0, {"reward": 0.5, "train/loss": math.nan})
    board.log(1, {"reward": 0.75, "train/loss": 2.0, "gap": math.inf})
    board.close(failed=False)
    assert shown(tmp_path / "a") == {"reward": [(0, 0.5), (1, 0.75)], "train/loss": [(1, 2.0)]}


def test_another_driver_writes_all_once(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    SmallRun(objects, "a", config_tree("a")).run(3)
    told = iterations(objects, "a")
    for _ in range(2):
        close_all(open_trackers(config(tmp_path, tensorboard=True), objects), failed=False)
    found = shown(tmp_path / "runs" / "a" / "tensorboard")
    assert set(found) == set(told[0]) - {"iteration"}
    for tag, points in found.items():
        assert [step for step, _ in points] == [0, 1, 2]
        assert [value for _, value in points] == pytest.approx([m[tag] for m in told])


def test_a_folder_of_ones_own_holds_one_a_run(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    SmallRun(objects, "a", config_tree("a")).run(1)
    given = config(tmp_path, tensorboard=True, tensorboard_dir=str(tmp_path / "boards"))
    close_all(open_trackers(given, objects), failed=False)
    assert shown(tmp_path / "boards" / "a")
    assert open_trackers(config(tmp_path), objects) == []


# --- trackers and runs ----------------------------------------------------------------------------


def test_a_tracker_that_fails_is_told_once_and_catches_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.observe.aside.RETRY_S", 0.0)
    bad, good = Board(OSError("no\nroute"), OSError("still no route")), Board()
    with caplog.at_level(logging.WARNING, "sluice"):
        both = [Aside("bad", lambda: bad), Aside("good", lambda: good)]
        for i in range(3):
            for one in both:
                one.log(i, {"x": i})
            if i < 2:
                assert bad.raised.acquire(timeout=10)
        close_all(both, failed=True)
    assert [i for i, _ in good.taken] == [i for i, _ in bad.taken] == [0, 1, 2]
    assert good.closed is bad.closed is True
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("bad does not take the run's metrics (OSError: no route)")


def test_after_a_failure_nothing_is_tried_for_a_while_but_at_the_end() -> None:
    board = Board(OSError("down"))
    one = Aside("board", lambda: board, [{"iteration": 0, "x": 1.0}])
    one.log(1, {"x": 2.0})
    close_all([one], failed=False)
    assert board.taken == [(0, {"x": 1.0}), (1, {"x": 2.0})]
    assert board.closed is False


def test_a_tracker_that_cannot_be_made_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Tracker:
        raise RuntimeError("no key")

    one = Aside("wandb", make)
    for i in range(3):
        one.log(i, {"x": 1.0})
    close_all([one], failed=False)
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == [
        "wandb does not take the run's metrics (RuntimeError: no key)"
    ]


def test_a_tracker_that_hangs_costs_the_end_of_a_run_its_patience_alone() -> None:
    release = threading.Event()

    class Hanging(Board):
        def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
            release.wait(60)

    one = Aside("slow", Hanging, [{"iteration": 0}])
    close_all([one], failed=False, patience_s=0.05)
    release.set()
    one.wait()


def test_settings_are_checked_and_change_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trackers(config(tmp_path, tensorboard=True))
    with pytest.raises(ConfigError, match=r"set tracking\.tensorboard_dir"):
        check_trackers(config("s3://bucket/runs", tensorboard=True))
    plain = config_digest(config(tmp_path))
    for tracking in ({"tensorboard": True}, {"wandb": True, "wandb_project": "p"}):
        assert config_digest(config(tmp_path, **tracking)) == plain
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(
            ConfigError, match=rf"tracking\.{name} = true.*pip install 'sluice-rl\["
        ):
            check_trackers(config(tmp_path, **{name: True}))


@pytest.mark.parametrize(
    ("tracking", "said"),
    [
        ({"wandb_project": "p"}, r"tracking\.wandb = false"),
        ({"mlflow_experiment": "e"}, r"tracking\.mlflow = false"),
        ({"wandb": True, "wandb_host": "https://me:pass@host"}, "holds a password"),
        ({"mlflow": True, "mlflow_tracking_uri": "http://me:pass@host"}, "holds a password"),
        ({"wandb": True, "wandb_run_id": "a/b"}, "wandb_run_id"),
    ],
)
def test_settings_without_a_use_and_secrets_are_refused(
    tmp_path: Path, tracking: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, **tracking)


def test_a_run_that_could_only_ask_for_a_key_is_stopped_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    for name in (*trackers.WANDB_KEYS, "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    asked = config(tmp_path, wandb=True)
    with pytest.raises(ConfigError, match="set WANDB_API_KEY"):
        check_trackers(asked)
    check_trackers(config(tmp_path, wandb=True, wandb_mode="offline"))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    check_trackers(asked)
    with pytest.raises(ConfigError, match="set WANDB_API_KEY"):
        check_trackers(config(tmp_path, wandb=True, wandb_host="https://wandb.here:8080"))
    with pytest.raises(ConfigError, match=r"set tracking\.mlflow_tracking_uri"):
        check_trackers(config(tmp_path, mlflow=True))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_trackers(config(tmp_path, mlflow=True))


# --- wandb ----------------------------------------------------------------------------------------


@dataclass
class WandbRun:
    """As a run of wandb: a step behind the newest is not taken."""

    step: int = 0
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    exit_code: int | None = None

    def log(self, data: dict[str, float], step: int, commit: bool) -> None:
        assert step >= self.step and commit
        self.rows[step], self.step = data, step + 1

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_a_run_of_wandb_goes_on_behind_its_last_step() -> None:
    there = WandbRun()
    first = Wandb(there)
    first.log(0, {"x": 0.0, "y": math.nan})
    first.log(1, {"x": 1.0})
    first.close(failed=True)
    assert there.exit_code == 1
    again = Wandb(there)
    for i in range(4):
        again.log(i, {"x": i * 10.0})
    again.close(failed=False)
    assert there.rows == {0: {"x": 0.0}, 1: {"x": 1.0}, 2: {"x": 20.0}, 3: {"x": 30.0}}
    assert there.exit_code == 0


def test_all_drivers_of_a_run_name_the_same_run_and_another_run_another(tmp_path: Path) -> None:
    found = []
    for root in ("one", "one", "other"):
        objects = Objects.open(str(tmp_path / root))
        if not found or root == "other":
            SmallRun(objects, "a", config_tree("a")).run(1)
        found.append(tracked_id(objects, "a"))
    assert found[0] == found[1] and found[0].startswith("a-")
    assert found[0] != found[2], "a run that is made again is another"


def test_what_wandb_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    objects = Objects.open(str(tmp_path))
    SmallRun(objects, "a", config_tree("a")).run(1)
    plain = wandb_arguments(config(tmp_path, wandb=True), objects)
    assert (plain["project"], plain["name"], plain["resume"]) == ("sluice", "a", "allow")
    assert plain["dir"] == str(tmp_path / "runs" / "a" / "wandb")
    assert plain["config"]["rollout"]["n_samples_per_prompt"] == 2
    own = config(tmp_path, wandb=True, wandb_run_id="mine", wandb_mode="offline", wandb_group="g")
    given = wandb_arguments(own, objects)
    assert (given["id"], given["mode"], given["group"]) == ("mine", "offline", "g")
    assert given["resume"] is None


def test_wandb_itself_takes_a_run_offline(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    SmallRun(objects, "a", config_tree("a")).run(2)
    asked = config(tmp_path, wandb=True, wandb_mode="offline")
    check_trackers(asked)
    close_all(open_trackers(asked, objects), failed=False, patience_s=60)
    [written] = (tmp_path / "runs" / "a" / "wandb").rglob("*.wandb")
    assert written.stat().st_size > 0


# --- MLflow ---------------------------------------------------------------------------------------


def test_names_and_settings_as_mlflow_takes_them() -> None:
    assert mlflow_name("eval/a/pass@4") == "eval/a/pass_4"
    assert flat({"a": {"b": 1, "c": None}, "d": [2], "e": ""}) == {"a.b": 1, "d": [2], "e": ""}


class MlflowServer:
    """As much of an `MlflowClient` as a tracker uses, over one run."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(run_id="r", status="RUNNING")
        self.data = SimpleNamespace(metrics={}, params={})
        self.points: list[tuple[str, float, int]] = []
        self.tags: dict[str, str] | None = None
        self.largest = 0

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1") if self.tags is not None else None

    def create_experiment(self, name: str) -> str:
        return "1"

    def search_runs(self, experiments: list[str], **query: Any) -> list[Any]:
        wanted = query["filter_string"].split("'")[1]
        return [self] if self.tags is not None and wanted in self.tags.values() else []

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        self.tags = tags
        return self

    def update_run(self, run_id: str, status: str) -> None:
        self.info.status = status

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.points += [(m.key, m.value, m.step) for m in metrics]
        self.data.metrics |= {m.key: m.value for m in metrics}
        self.data.params |= {p.key: p.value for p in params}
        self.largest = max(self.largest, len(metrics), len(params))


def test_a_run_of_mlflow_is_found_again_and_takes_each_iteration_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entities = SimpleNamespace(
        Metric=namedtuple("Metric", "key value timestamp step"),
        Param=namedtuple("Param", "key value"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    server = MlflowServer()
    settings = {"train": {"lr": 0.1}} | {f"k{i}": "x" * 600 for i in range(150)}
    first = MLflow(server, "tests", "a-123", "a", settings)
    first.log(0, {f"m{i}": float(i) for i in range(1500)})
    first.log(1, {"x": 1.0, "y": math.nan})
    first.close(failed=True)
    assert server.info.status == "FAILED" and server.largest <= 900
    again = MLflow(server, "tests", "a-123", "a", {"train": {"lr": 9.9}})
    assert server.info.status == "RUNNING"
    for i in range(3):
        again.log(i, {"x": float(i)})
    again.close(failed=False)
    assert [p for p in server.points if p[0] == "x"] == [("x", 1.0, 1), ("x", 2.0, 2)]
    assert len([p for p in server.points if p[2] == 0]) == 1501
    assert server.data.params["train.lr"] == "0.1" and len(server.data.params["k1"]) == 500
    assert server.info.status == "FINISHED"


def test_mlflow_itself_takes_each_iteration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    for upto, failed in ((2, True), (4, False)):
        board = MLflow(client, "tests", "a-123", "a", {"train": {"lr": 0.1}})
        for i in range(upto):
            board.log(i, {"x": float(i), "y@1": math.inf})
        board.close(failed=failed)
    [experiment] = [e for e in client.search_experiments() if e.name == "tests"]
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "x")
    assert sorted((m.step, m.value) for m in history) == [(i, float(i)) for i in range(4)]
    assert run.info.status == "FINISHED" and run.data.params["train.lr"] == "0.1"
