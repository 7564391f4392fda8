"""Runs that are killed at chosen points, gone on with, and compared with one that never was.

How it works. The driver runs with `tests/support/faults` on its PYTHONPATH and SLUICE_FAULT naming
a list of points. It kills itself (or another process) at the first point that it reaches and that
has not fired; whoever drives the run starts it again, and it meets the next point. So one short run
takes many kills, and each costs one start. Three iterations hold every stage three times.

What is compared (`outcome`): digest of the final model and optimizer, every sample with its prompt,
tokens, reward and whether it was trained on, in order; `sluice verify` must find nothing. What must
not be left (`leftovers`): a process, an actor, a scratch folder, an open row in Prefect.

Time to go on (`Kill.to_stage`): from the SIGKILL to the moment when the next driver begins the
first stage that was not committed: started, connected, its actors up, the store looked through.
`Kill.to_manifest` is until the first new manifest, where no other kill came first. With a fault
inside a run both count from the signal to what the same driver does next.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from real_runs import QUICKSTART, Sluice, finish

from rlcore.observe.history import summarise
from rlcore.observe.sql import connect
from rlcore.store.lineage import verify_run
from rlcore.store.objects import Objects

FAULTS = Path(__file__).with_name("faults")
STAGES = ("rollout", "reward", "filter", "train", "weight_sync", "evaluate", "checkpoint")
PHASES = ("before", "middle", "parts", "committed")
ITERATIONS = 3
DRIVER_TIMEOUT_S = 180.0
GONE_S = 90.0
OPEN_STATES = ("RUNNING", "PENDING", "CANCELLING")


@dataclass(frozen=True)
class Point:
    """Where a fault strikes; see `tests/support/faults/sitecustomize.py`."""

    target: str
    stage: str
    phase: str
    iteration: int
    signal: str = "kill"

    @property
    def place(self) -> tuple[int, int, int]:
        """Its position in the run."""
        stages = (*STAGES, "iteration")
        return self.iteration, stages.index(self.stage), PHASES.index(self.phase)

    def spec(self, usual: dict[str, float]) -> str:
        """As SLUICE_FAULT has it; the middle of a stage is half its usual time."""
        phase = self.phase
        if phase == "middle":
            phase += f"@{usual[self.stage] / 2:.4f}"
        return f"{self.signal}:{self.target}:{self.stage}:{phase}:{self.iteration}"


@dataclass(frozen=True)
class Outcome:
    """What a run came to; equal for runs that did the same."""

    state_sha256: str | None
    rewards: tuple[float, ...]
    samples: int
    samples_sha256: str
    """Of all samples in order: iteration, prompt, place, tokens, reward, trained on or not."""


@dataclass(frozen=True)
class Calm:
    """A run that nothing happened to."""

    outcome: Outcome
    usual: dict[str, float]
    """Seconds of each stage."""


@dataclass
class Kill:
    """A fault that struck."""

    point: str
    late: bool
    """The stage's body was done before the middle of its usual time."""
    at: float
    to_stage: float | None = None
    to_manifest: float | None = None


def every_point(target: str, iterations: int = ITERATIONS) -> list[Point]:
    """All stages x phases, spread over the iterations; `rollout` is hit in one not begun ahead."""
    points = [
        Point(target, stage, phase, (s + p + 2) % iterations)
        for s, stage in enumerate(STAGES)
        for p, phase in enumerate(PHASES)
    ]
    return sorted(points, key=lambda point: point.place)


def tiny(folder: Path, rollout: str = "", more: str = "") -> Path:
    """The quickstart with three small iterations, each with all seven stages.

    Args:
        folder: of the file.
        rollout: more lines of that section.
        more: more sections.
    """
    lines = [
        f'extends = "{QUICKSTART}"',
        "[rollout]\nrollout_batch_size = 8\nn_samples_per_prompt = 8\n" + rollout,
        f"[train]\nglobal_batch_size = 64\nnum_iterations = {ITERATIONS}",
        "[eval]\neval_interval = 1",
        "[checkpoint]\nsave_interval = 1\nstate_interval = 1",
        more,
    ]
    path = folder / "tiny.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def outcome(root: Path | str, run_id: str) -> Outcome:
    """What a finished run came to, after a look whether it is whole."""
    objects = Objects.open(str(root))
    report = verify_run(objects, run_id)
    assert report.ok, report.errors
    summary = summarise(objects, run_id)
    assert summary.status == "completed", (summary.status, summary.message)
    rows = (
        connect(objects)
        .execute(
            "SELECT iteration, index, prompt_id, tokens, reward, keep FROM samples "
            f"WHERE run_id = '{run_id}' ORDER BY iteration, row"
        )
        .fetchall()
    )
    return Outcome(
        summary.state_sha256,
        tuple(m["reward"] for m in summary.metrics),
        len(rows),
        hashlib.sha256(repr(rows).encode()).hexdigest(),
    )


def epochs(root: Path, run_id: str) -> set[int]:
    """The epochs of the drivers that committed the run's stages."""
    query = f"SELECT DISTINCT epoch FROM stages WHERE run_id = '{run_id}'"
    return {epoch for (epoch,) in connect(Objects.open(str(root))).execute(query).fetchall()}


def usual_seconds(root: Path, run_id: str) -> dict[str, float]:
    """How long each stage takes where nothing was begun ahead, by the manifests of a run."""
    rows = (
        connect(Objects.open(str(root)))
        .execute(f"SELECT stage, max(seconds) FROM stages WHERE run_id = '{run_id}' GROUP BY 1")
        .fetchall()
    )
    return dict(rows)


def calm_run(folder: Path, config: Path) -> Calm:
    """An undisturbed run of a config."""
    Sluice(folder / "root", folder)("train", str(config), "--run-id", "calm")
    return Calm(outcome(folder / "root", "calm"), usual_seconds(folder / "root", "calm"))


# --- a run and its faults -------------------------------------------------------------------------


@dataclass
class Chaos:
    """A run whose driver meets faults.

    Attributes:
        run_id: its name.
        points: in the order in which they will be met.
        usual: seconds of each stage.
        temp: folder for everything temporary of its drivers.
        faults: folder of the fault's events and markers.
    """

    run_id: str
    points: list[Point]
    usual: dict[str, float]
    temp: Path
    faults: Path = field(init=False)
    stack: Path | None = None
    """The record of the stack that it runs in."""

    def __post_init__(self) -> None:
        self.faults = self.temp / "faults"
        self.faults.mkdir()
        self.plan(self.points)

    def env(self) -> dict[str, str]:
        """What the driver finds in its environment."""
        path = [str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(path),
            "SLUICE_FAULT": str(self.faults / "points"),
            "SLUICE_FAULT_DIR": str(self.faults),
            "SLUICE_FAULT_STACK": str(self.stack or ""),
            "TMPDIR": str(self.temp),
        }

    def plan(self, points: list[Point]) -> None:
        """What drivers that start from now on will meet."""
        lines = [point.spec(self.usual) for point in points]
        (self.faults / "points").write_text("\n".join(lines))

    def events(self) -> list[dict[str, Any]]:
        """What happened so far, in order."""
        path = self.faults / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted((json.loads(line) for line in lines), key=lambda event: event["at"])

    def fired(self) -> int:
        """How many points have struck."""
        return sum(event["event"] == "fired" for event in self.events())

    def assert_all_struck(self) -> None:
        """Every point was met, and found whom it was meant for."""
        struck = [event for event in self.events() if event["event"] == "fired"]
        missed = [event["point"] for event in struck if not event["victims"]]
        assert not missed, missed
        met = {event["point"] for event in struck}
        missing = [p for p in self.points if p.spec(self.usual) not in met]
        assert not missing, (missing, met)

    def kills(self) -> list[Kill]:
        """Every fault that struck, with the time until the run went on."""
        events = self.events()
        found = []
        for n, event in enumerate(events):
            if event["event"] != "fired":
                continue
            kill = Kill(event["point"], event["late"], event["at"])
            for later in events[n + 1 :]:
                passed = round(later["at"] - kill.at, 3)
                if later["event"] == "begun" and kill.to_stage is None:
                    kill.to_stage = passed
                if later["event"] == "committed":
                    kill.to_manifest = passed
                if later["event"] in ("committed", "fired"):
                    break
            found.append(kill)
        return found

    def drivers(self) -> int:
        """How many drivers the run had."""
        return sum(event["event"] == "driver" for event in self.events())

    def processes(self) -> list[psutil.Process]:
        """Those of the processes that were there when a fault struck which are still alive."""
        seen = {tuple(one) for event in self.events() for one in event.get("tree", ())}
        alive = []
        for pid, created in seen:
            try:
                process = psutil.Process(int(pid))
                if (
                    abs(process.create_time() - created) < 0.1
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    alive.append(process)
            except psutil.NoSuchProcess:
                continue
        return alive

    def scratch(self) -> list[str]:
        """Scratch folders that are left."""
        return [path.name for path in self.temp.glob("sluice-*")]

    def assert_nothing_left(self) -> None:
        """No process of a killed driver and no scratch folder is there any more."""
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, [" ".join(p.cmdline()[:4]) for p in left]
        assert not self.scratch()


@contextmanager
def chaos(run_id: str, points: list[Point], usual: dict[str, float]) -> Iterator[Chaos]:
    """Faults for one run, with a short temporary folder: Ray's sockets have long names."""
    temp = Path(tempfile.mkdtemp(prefix="slc-"))
    try:
        yield Chaos(run_id, points, usual, temp)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def run_through(
    faults: Chaos, sluice: Sluice, config: Path, between: Callable[[], None] | None = None
) -> None:
    """Train, and resume after each kill, until the run is done.

    Args:
        faults: each of its points ends a driver.
        sluice: the command.
        config: of the run.
        between: called after each kill, before the resume.
    """
    killed = Sluice(sluice.root, sluice.cwd, env=sluice.env | faults.env())
    args = ["train", str(config), "--run-id", faults.run_id]
    for _ in range(len(faults.points) + 1):
        before = faults.fired()
        process = killed.start(*args)
        out, err = finish(process, DRIVER_TIMEOUT_S)
        if process.returncode == 0:
            break
        assert process.returncode == -9, f"exit code {process.returncode}\n{out}\n{err}"
        assert faults.fired() == before + 1, "killed by something else"
        if between is not None:
            between()
        args = ["resume", faults.run_id]
    assert process.returncode == 0
    faults.assert_all_struck()


# --- what Prefect shows ---------------------------------------------------------------------------


def open_rows_in(database: Path) -> list[tuple[str, str]]:
    """Flow and task runs in a private server's database that are still open."""
    marks = ", ".join("?" * len(OPEN_STATES))
    rows: list[tuple[str, str]] = []
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        for table in ("flow_run", "task_run"):
            query = f"SELECT name, state_type FROM {table} WHERE state_type IN ({marks})"
            rows += connection.execute(query, OPEN_STATES).fetchall()
    return rows


def open_rows_at(api_url: str) -> list[tuple[str, str]]:
    """The same, asked of a server."""
    rows = []
    for kind in ("flow_runs", "task_runs"):
        chosen = {kind: {"state": {"type": {"any_": list(OPEN_STATES)}}}, "limit": 200}
        answer = httpx.post(f"{api_url}/{kind}/filter", json=chosen, timeout=30)
        answer.raise_for_status()
        rows += [(row["name"], row["state_type"]) for row in answer.json()]
    return rows


# --- figures --------------------------------------------------------------------------------------


def record(scenario: str, faults: Chaos) -> None:
    """Add the kills to the file that SLUICE_CHAOS_RECORD names, if it does."""
    path = os.environ.get("SLUICE_CHAOS_RECORD")
    if path is not None:
        line = {"scenario": scenario, "kills": [asdict(kill) for kill in faults.kills()]}
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")
