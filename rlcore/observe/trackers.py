"""Metrics of a run for the tools that people compare runs with.

A tracker is a view: what it shows is made from the store. A driver that takes a run over writes all
committed iterations again, so that nothing is missing and nothing twice after a kill.
"""

import math
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlcore.config.tree import RunConfig
from rlcore.errors import ConfigError
from rlcore.observe.history import iterations
from rlcore.store.objects import Objects
from rlcore.store.paths import run_prefix

OURS = "events.out.tfevents."
"""How the names of TensorBoard's files begin."""


class Tracker(Protocol):
    """Takes the metrics of committed iterations, each once, in order."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take one iteration's."""

    def close(self) -> None:
        """Write what is still held."""


def check_trackers(config: RunConfig) -> None:
    """The trackers that are asked for can be used here.

    Raises:
        ConfigError: naming the setting.
    """
    if not config.tracking.tensorboard:
        return
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tracking.tensorboard = true, but tensorboard is not installed; install the extra "
            "`tracking`"
        )
    if "://" in config.storage.root and not config.tracking.tensorboard_dir:
        raise ConfigError(
            f"tracking.tensorboard = true with storage.root = {config.storage.root!r}: "
            "TensorBoard's files need a local folder; set tracking.tensorboard_dir"
        )


def open_trackers(config: RunConfig, objects: Objects) -> list[Tracker]:
    """The trackers that are asked for, each told what is committed already."""
    if not config.tracking.tensorboard:
        return []
    own = objects.local_path(f"{run_prefix(config.run.id)}/tensorboard")
    given = config.tracking.tensorboard_dir
    folder = Path(given) / config.run.id if given else own
    assert folder is not None
    return [TensorBoard(folder, iterations(objects, config.run.id))]


class TensorBoard:
    """Event files in a folder of the run.

    Args:
        folder: of this run alone; its event files are replaced.
        past: `iteration` and metrics of what is committed.
    """

    def __init__(self, folder: Path, past: Sequence[Mapping[str, Any]] = ()) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{OURS}*"):
            old.unlink()
        self._writer = EventFileWriter(str(folder))
        for one in past:
            self.log(int(one["iteration"]), {k: v for k, v in one.items() if k != "iteration"})
        self._writer.flush()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take one iteration's; what is no finite number has no place in a chart."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        event = Event(wall_time=time.time(), step=iteration, summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        """Write what is still held."""
        self._writer.close()
