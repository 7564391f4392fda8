"""The tools that people compare runs with, each as a tracker.

Invariants:
- A tracker may be given iterations that it was given before, by a driver that was killed: it shows
  each once.
- What is no finite number has no place in a chart.
"""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

OURS = "events.out.tfevents."
"""How the names of TensorBoard's files begin."""
RUN_TAG = "sluice.run"
LAST = "sluice.iteration"
"""In MLflow: the tag that says which run it is, and the metric that comes last of an iteration."""
LARGEST_BATCH = 900
"""Metrics that MLflow takes at a time, with room left."""
PARAMETERS = 100
LONGEST = 500
"""Parameters that it takes at a time, and characters of each."""

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """Takes the metrics of committed iterations, in order."""

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Take one iteration's."""

    def close(self, *, failed: bool) -> None:
        """Write what is still held, and say how the run ended."""


class TensorBoard:
    """Event files in a folder of the run.

    Args:
        folder: of this run alone; its event files are replaced.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{OURS}*"):
            old.unlink()
        self._writer = EventFileWriter(str(folder))

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Take one iteration's."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in finite(metrics).items()]
        event = Event(wall_time=time.time(), step=iteration, summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self, *, failed: bool) -> None:
        """Write what is still held."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases.

    A run that goes on begins at the step behind its last; what comes with an earlier step is there.
    Written offline, each driver's folder holds the whole run.

    Args:
        run: what `wandb.init` gives.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._next = int(run.step)

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Take one iteration's."""
        if iteration < self._next:
            return
        self._run.log(finite(metrics), step=iteration, commit=True)
        self._next = iteration + 1

    def close(self, *, failed: bool) -> None:
        """Send what is still held."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, found again by its tag.

    Args:
        client: an `MlflowClient`.
        experiment: name of the experiment, which is made where there is none.
        tag: what the run is known by.
        name: shown name of the run.
        settings: the run's parameters; kept as they were when the run was made.
    """

    def __init__(
        self, client: Any, experiment: str, tag: str, name: str, settings: Mapping[str, Any]
    ) -> None:
        self._client = client
        there = client.get_experiment_by_name(experiment)
        where = client.create_experiment(experiment) if there is None else there.experiment_id
        found = client.search_runs(
            [where],
            filter_string=f"tags.`{RUN_TAG}` = '{tag}'",
            max_results=1,
            order_by=["attributes.start_time ASC"],
        )
        run = found[0] if found else client.create_run(where, tags={RUN_TAG: tag}, run_name=name)
        self._id = run.info.run_id
        if found:
            client.update_run(self._id, status="RUNNING")
        self._next = int(run.data.metrics.get(LAST, -1.0)) + 1
        self._describe(settings, set(run.data.params))

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Take one iteration's, in requests of which the last completes it."""
        from mlflow.entities import Metric

        if iteration < self._next:
            return
        now = time.time_ns() // 1_000_000
        values = {mlflow_name(k): v for k, v in finite(metrics).items()} | {LAST: float(iteration)}
        points = [Metric(name, value, now, iteration) for name, value in values.items()]
        for start in range(0, len(points), LARGEST_BATCH):
            self._client.log_batch(self._id, metrics=points[start : start + LARGEST_BATCH])
        self._next = iteration + 1

    def close(self, *, failed: bool) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")

    def _describe(self, settings: Mapping[str, Any], known: set[str]) -> None:
        from mlflow.entities import Param

        told = [
            Param(mlflow_name(name), text[:LONGEST])
            for name, value in flat(settings).items()
            if mlflow_name(name) not in known and (text := str(value))
        ]
        for start in range(0, len(told), PARAMETERS):
            self._client.log_batch(self._id, params=told[start : start + PARAMETERS])


def finite(metrics: Metrics) -> dict[str, float]:
    """Those that are finite numbers."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def mlflow_name(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by their dotted names; lists stay whole, None is left out."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found
