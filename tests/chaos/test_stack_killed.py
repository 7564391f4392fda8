"""A deployed run: its flow process killed again and again, and each part of the stack in turn. The
automation, or a retry, goes on; nothing else is done by hand.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from chaos_runs import Calm, Chaos, Point, chaos, every_point, open_rows_at, outcome, record
from real_runs import Sluice

from flows.commands.stack import Stack

DONE_S = 900.0
BUSY = 503
ACTORS = ("ray::EngineActor", "ray::RolloutActor", "ray::TrainerActor")
SETTINGS = {
    "train.num_iterations": 3,
    "train.global_batch_size": 64,
    "rollout.rollout_batch_size": 8,
    "rollout.n_samples_per_prompt": 8,
    "eval.eval_interval": 1,
    "checkpoint.save_interval": 1,
    "checkpoint.state_interval": 1,
    "run.max_attempts": 100,
}
"""Over the deployment's own, which are the quickstart's: the run that `calm` is."""
FLOW = every_point("flow")[::2]
PARTS = [
    Point("worker", "rollout", "middle", 0),
    Point("worker", "weight_sync", "committed", 1),
    Point("server", "reward", "committed", 0),
    Point("server", "train", "middle", 1),
    Point("ray", "train", "middle", 0),
    Point("ray", "evaluate", "before", 1),
    Point("machine", "checkpoint", "parts", 1),
]
"""A `machine` that is lost is noticed by its missing heartbeats, after two minutes."""


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_deployed_run_is_killed_and_goes_on_by_itself(
    sluice: Sluice, tmp_path: Path, calm: Calm
) -> None:
    with deployed("flows", FLOW, sluice, calm) as stack:
        stack.run_through("flows")
        stack.assert_as_calm(calm, "flows")
        stack.faults.assert_all_struck()
        record("deployed", stack.faults)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_every_part_of_the_stack_may_die(sluice: Sluice, tmp_path: Path, calm: Calm) -> None:
    with deployed("parts", PARTS, sluice, calm) as stack:
        for number, point in enumerate(PARTS):
            stack.faults.plan([point])
            stack.run_through(f"{point.target}-{number}")
            stack.assert_as_calm(calm, f"{point.target}-{number}")
        stack.faults.assert_all_struck()
        record("stack", stack.faults)


class Deployed:
    """A run of the deployment `rl-train/local` on a stack of its own."""

    def __init__(self, faults: Chaos, sluice: Sluice) -> None:
        self.faults = faults
        self._root = Path(sluice.root)
        faults.stack = self._root / "stack" / "stack.json"
        self._sluice = Sluice(sluice.root, sluice.cwd, env=faults.env())

    @property
    def stack(self) -> Stack:
        """What runs."""
        return Stack.load(str(self._root))

    def up(self) -> None:
        """Start what does not run."""
        self._sluice("up")

    def down(self) -> None:
        """End all of it."""
        self._sluice("down")

    def run_through(self, run_id: str) -> None:
        """Start one flow run and see it completed; what died of the stack is started again."""
        api = self.stack.api_url
        deployment = httpx.get(f"{api}/deployments/name/rl-train/local", timeout=30).json()
        overrides = SETTINGS | {"run.id": run_id}
        body = {"parameters": {"overrides": overrides}, "state": {"type": "SCHEDULED"}}
        url = f"{api}/deployments/{deployment['id']}/create_flow_run"
        deadline = time.monotonic() + DONE_S
        while (answer := httpx.post(url, json=body, timeout=30)).status_code == BUSY:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.5)
        made = answer.raise_for_status().json()
        while (state := self._state(made["id"]))["type"] != "COMPLETED":
            assert time.monotonic() < deadline, (state, self.faults.events()[-3:])
            if any(not self.stack.alive(name) for name in ("server", "ray", "worker")):
                self.up()
            elif state["type"] == "FAILED":
                self._retry(made["id"])
            time.sleep(0.3)

    def assert_as_calm(self, calm: Calm, run_id: str) -> None:
        """The run ended as the undisturbed one did, and left nothing."""
        assert outcome(self._root, run_id) == calm.outcome
        deadline = time.monotonic() + 30
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not left

    def _left(self) -> list[Any]:
        """Open rows and actors."""
        ray = psutil.Process(self.stack.processes["ray"].pid)
        names = [" ".join(p.cmdline()).strip() for p in ray.children(recursive=True)]
        actors = [name for name in names if name.startswith(ACTORS)]
        return [*open_rows_at(self.stack.api_url), *actors]

    def _state(self, flow_run: str) -> dict[str, Any]:
        try:
            answer = httpx.get(f"{self.stack.api_url}/flow_runs/{flow_run}", timeout=30)
            state: dict[str, Any] = answer.raise_for_status().json()["state"]
        except httpx.HTTPError:
            return {"type": "UNKNOWN"}
        return state

    def _retry(self, flow_run: str) -> None:
        argv = [sys.executable, "-m", "prefect", "flow-run", "retry", flow_run]
        env = os.environ | {"PREFECT_API_URL": self.stack.api_url}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
        # The automation may have been quicker.
        gone_on = done.returncode and self._state(flow_run)["type"] != "FAILED"
        assert gone_on or done.returncode == 0, done.stdout + done.stderr


@contextmanager
def deployed(run_id: str, points: list[Point], sluice: Sluice, calm: Calm) -> Iterator[Deployed]:
    """A stack with a run that will meet faults."""
    with chaos(run_id, points, calm.usual) as faults:
        stack = Deployed(faults, sluice)
        try:
            stack.up()
            yield stack
        finally:
            stack.down()
        faults.assert_nothing_left()
