"""TensorBoard's files say what the store says, once, after any number of drivers."""

import math
from pathlib import Path
from typing import Any

import pytest
from small_runs import SmallRun, config_tree
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlcore.config import RunConfig, build_config, config_digest
from rlcore.errors import ConfigError
from rlcore.observe.history import iterations
from rlcore.observe.trackers import TensorBoard, check_trackers, open_trackers
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


def test_what_is_logged_is_shown(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "a")
    board.log(0, {"reward": 0.5, "train/loss": math.nan})
    board.log(1, {"reward": 0.75, "train/loss": 2.0, "gap": math.inf})
    board.close()
    assert shown(tmp_path / "a") == {"reward": [(0, 0.5), (1, 0.75)], "train/loss": [(1, 2.0)]}


def test_another_driver_writes_all_once(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    SmallRun(objects, "a", config_tree("a")).run(3)
    told = iterations(objects, "a")
    for _ in range(2):
        [board] = open_trackers(config(tmp_path, tensorboard=True), objects)
        board.close()
    found = shown(tmp_path / "runs" / "a" / "tensorboard")
    assert set(found) == set(told[0]) - {"iteration"}
    for tag, points in found.items():
        assert [step for step, _ in points] == [0, 1, 2]
        assert [value for _, value in points] == pytest.approx([m[tag] for m in told])


def test_a_folder_of_ones_own_holds_one_a_run(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    SmallRun(objects, "a", config_tree("a")).run(1)
    given = config(tmp_path, tensorboard=True, tensorboard_dir=str(tmp_path / "boards"))
    [board] = open_trackers(given, objects)
    board.close()
    assert shown(tmp_path / "boards" / "a")
    assert open_trackers(config(tmp_path), objects) == []


def test_settings_are_checked_and_change_no_digest(tmp_path: Path) -> None:
    check_trackers(config(tmp_path, tensorboard=True))
    with pytest.raises(ConfigError, match=r"set tracking\.tensorboard_dir"):
        check_trackers(config("s3://bucket/runs", tensorboard=True))
    plain, tracked = config(tmp_path), config(tmp_path, tensorboard=True)
    assert config_digest(plain) == config_digest(tracked)
