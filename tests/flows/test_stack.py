"""`sluice up`, its deployments as the server holds them, and runs operated from Prefect."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from postgres import postgres
from real_runs import QUICKSTART, Sluice, wait_for

from flows.commands.stack import DEPLOYMENTS, POOL, Stack, of_folder
from flows.operation.deploy import automations
from rlcore.config import load_config
from rlcore.config.tree import RunConfig

SMALL = {
    "train.num_iterations": 3,
    "train.global_batch_size": 64,
    "rollout.rollout_batch_size": 8,
    "rollout.n_samples_per_prompt": 8,
    "eval.eval_interval": 3,
    "checkpoint.save_interval": 3,
}
OPEN = ("RUNNING", "PENDING", "CANCELLING")


@dataclass
class Running:
    """A stack that is up."""

    sluice: Sluice
    root: Path
    flow_runs: dict[str, str] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        return Stack.load(str(self.root))

    def get(self, path: str) -> Any:
        return httpx.get(self.stack.api_url + path, timeout=30).raise_for_status().json()

    def rows(self, kind: str, **query: Any) -> list[dict[str, Any]]:
        url = f"{self.stack.api_url}/{kind}/filter"
        found: list[dict[str, Any]] = httpx.post(url, json=query, timeout=30).json()
        return found

    def prefect(self, *args: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *args],
            env=self.stack.env(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def begin(self, deployment: str, **parameters: Any) -> str:
        """Start a flow run as CI does; returns its id."""
        words = [w for k, v in parameters.items() for w in ("--param", f"{k}={json.dumps(v)}")]
        told = self.prefect("deployment", "run", deployment, *words)
        return told.split("UUID: ")[1].split()[0]

    def train(self, run_id: str, **settings: Any) -> str:
        return self.begin("rl-train/local", overrides=SMALL | {"run.id": run_id} | settings)

    def ended(self, flow_run: str, seconds: float = 200) -> dict[str, Any]:
        """Wait until a flow run is in a final state other than Crashed."""
        url = f"/flow_runs/{flow_run}"
        final = ("COMPLETED", "FAILED", "CANCELLED")
        wait_for(lambda: self.get(url)["state_type"] in final, seconds)
        found: dict[str, Any] = self.get(url)
        return found

    def processes(self) -> list[psutil.Process]:
        """All that descends from the stack's processes."""
        return [p for daemon in self.stack.processes.values() for p in daemon.family()]

    def open_rows(self) -> list[str]:
        """Flow and task runs that look as if something worked on them."""
        kinds = ("flow_runs", "task_runs")
        rows = [row for kind in kinds for row in self.rows(kind, limit=200)]
        return [f"{row['name']}: {row['state_name']}" for row in rows if row["state_type"] in OPEN]


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    """A stack; what it leaves behind after `down` is an error."""
    with tempfile.TemporaryDirectory(prefix="slc-") as folder:
        root = Path(folder) / "root"
        sluice = Sluice(root, Path(folder))
        running = Running(sluice, root)
        printed = sluice("up")
        members = running.processes()
        try:
            assert running.stack.page in printed and str(root) in printed
            yield running
        finally:
            members += running.processes()
            temp = running.stack.ray_temp
            sluice("down")
            _, left = psutil.wait_procs(members, timeout=5)
            assert [p.cmdline() for p in left] == []
            assert of_folder(temp) == [] and not Path(temp).exists()
            assert "no stack" in sluice("down")


def test_what_is_deployed_is_what_the_file_says(up: Running) -> None:
    found = {d["name"]: d for d in up.rows("deployments")}
    assert set(found) == set(DEPLOYMENTS)
    assert {d["work_pool_name"] for d in found.values()} == {POOL}
    assert {d["work_queue_name"] for d in found.values()} == {up.stack.queue}
    assert {d["entrypoint"] for d in found.values()} == {
        "flows.train.rl_train",
        "flows.one_shot.one_iteration",
        "flows.evaluate.rl_evaluate",
        "flows.gc.rl_gc",
    }
    # No step fetches code, and each run works where `up` was called.
    assert all(d["pull_steps"] in (None, []) for d in found.values())
    assert {d["job_variables"]["working_dir"] for d in found.values()} == {str(up.sluice.cwd)}
    [schedule] = found["artifacts"]["schedules"]
    assert (schedule["active"], schedule["schedule"]["cron"]) == (True, "17 3 * * *")
    assert found["artifacts"]["global_concurrency_limit"]["limit"] == 1
    assert found["artifacts"]["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"


def test_the_form_is_the_quickstart_with_help_and_defaults(up: Running) -> None:
    [local] = [d for d in up.rows("deployments") if d["name"] == "local"]
    given = RunConfig.model_validate(local["parameters"]["config"])
    quickstart = load_config(QUICKSTART, [f"storage.root='{up.root}'"])
    assert given == quickstart
    schema = local["parameter_openapi_schema"]
    assert set(schema["properties"]) == {"config", "overrides"}
    train = schema["definitions"]["TrainConfig"]["properties"]
    assert train["num_iterations"]["default"] == 100
    assert train["num_iterations"]["description"] == "Iterations of the run."
    bare = [
        f"{name}.{key}"
        for name, section in schema["definitions"].items()
        for key, one in section["properties"].items()
        if "description" not in schema["definitions"].get(one.get("$ref", "")[14:], one)
    ]
    assert bare == []


def test_automations_are_there_once_however_often_they_are_applied(up: Running) -> None:
    printed = up.sluice("up")
    assert "runs already" in printed
    found = up.rows("automations")
    assert sorted(a["name"] for a in found) == sorted(a["name"] for a in automations())
    assert all(a["enabled"] for a in found)


def test_a_run_with_overrides_completes_and_wait_says_so(up: Running) -> None:
    flow_run = up.train("first")
    printed = up.sluice("wait", "first", "--timeout", "200")
    assert printed.splitlines()[-1].endswith("completed, 3/3")
    assert up.ended(flow_run)["name"] == "train-first"
    assert up.sluice.json("wait", "first")["exit_code"] == 0
    # It used the stack's Ray, and its root.
    config = json.loads((up.root / "runs" / "first" / "run.json").read_text())["config"]
    assert config["cluster"]["ray_address"] == "auto"
    assert up.sluice.json("verify", "first")["ok"]


def test_bad_overrides_are_said_and_leave_no_run(up: Running) -> None:
    flow_run = up.train("bad", **{"train.num_iterationz": 3})
    message = up.ended(flow_run)["state"]["message"]
    assert "did you mean train.num_iterations?" in message
    assert not (up.root / "runs" / "bad").exists()


def test_doctor_finds_the_stack_well(up: Running) -> None:
    findings = {f["name"]: f for f in up.sluice.json("doctor", str(QUICKSTART))}
    assert {f["level"] for f in findings.values()} <= {"ok", "warn"}
    assert up.stack.ray_address in findings["ray"]["found"]
    assert up.stack.api_url in findings["prefect api"]["found"]
    assert findings["websocket"]["level"] == findings["store"]["level"] == "ok"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cancel_frees_everything_within_ten_seconds(up: Running) -> None:
    idle = {p.pid for p in up.processes()}
    flow_run = up.train("long", **{"train.num_iterations": 500})
    wait_for(up.sluice.committed("long", 1).exists, 200)
    assert {p.pid for p in up.processes()} - idle
    up.prefect("flow-run", "cancel", flow_run)
    began = time.monotonic()
    wait_for(lambda: up.get(f"/flow_runs/{flow_run}")["state_type"] == "CANCELLED", 10)
    wait_for(lambda: not ours(up, idle), 10)
    assert time.monotonic() - began < 10
    wait_for(lambda: not up.open_rows(), 10)
    assert "cancelled" in up.sluice("wait", "long", code=5)
    [row] = [r for r in up.sluice.json("runs") if r["run_id"] == "long"]
    assert row["status"] == "cancelled"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failed_run_goes_on_after_retry(up: Running, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "from pathlib import Path\n"
        "def reward(args, sample, **kwargs):\n"
        f"    if sample.response and not Path({str(tmp_path / 'mended')!r}).exists():\n"
        "        raise RuntimeError('not mended')\n"
        "    return float(sample.response == sample.label)\n"
    )
    flow_run = up.train("mended", **{"reward.custom_rm_path": f"{reward}:reward"})
    failed = up.ended(flow_run)
    assert failed["state_type"] == "FAILED" and "not mended" in failed["state"]["message"]
    assert "not mended" in up.sluice("wait", "mended", code=1)
    manifest = up.root / "runs" / "mended" / "it" / "000000" / "rollout" / "_MANIFEST.json"
    before = manifest.read_bytes()
    (tmp_path / "mended").touch()
    up.prefect("flow-run", "retry", flow_run)
    up.sluice("wait", "mended", "--timeout", "200")
    after = up.ended(flow_run)
    assert (after["state_type"], after["run_count"]) == ("COMPLETED", 2)
    assert manifest.read_bytes() == before
    assert up.open_rows() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_without_a_hand_and_ends_as_an_undisturbed_one(up: Running) -> None:
    idle = {p.pid for p in up.processes()}
    flow_run = up.train("killed", **{"train.num_iterations": 5})
    wait_for(up.sluice.committed("killed", 1).exists, 200)
    [driver] = [p for p in ours(up, idle) if "prefect.engine" in p.cmdline()]
    driver.send_signal(signal.SIGKILL)
    up.sluice("wait", "killed", "--timeout", "200")
    ended = up.ended(flow_run)
    assert ended["state_type"] == "COMPLETED" and ended["run_count"] >= 2
    wait_for(lambda: not ours(up, idle), 20)
    assert up.open_rows() == []
    up.ended(up.train("undisturbed", **{"train.num_iterations": 5}))
    digests = [up.sluice.json("show", run)["state_sha256"] for run in ("killed", "undisturbed")]
    assert digests[0] == digests[1] is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_keeps_crashing_fails_with_a_sentence(up: Running, tmp_path: Path) -> None:
    poison = tmp_path / "model.py"
    poison.write_text(
        "import psutil\n"
        "def build(folder, seed):\n"
        "    for process in psutil.process_iter(['cmdline', 'cwd']):\n"
        "        words, cwd = process.info['cmdline'], process.info['cwd']\n"
        f"        if 'prefect.engine' in (words or []) and cwd == {str(up.sluice.cwd)!r}:\n"
        "            process.kill()\n"
    )
    settings = {"model.build": f"{poison}:build", "run.max_attempts": 2}
    flow_run = up.train("poison", **settings)
    failed = up.ended(flow_run)
    assert failed["state_type"] == "FAILED", failed["state"]
    assert "crashed 2 times without a new commit" in failed["state"]["message"]
    assert up.open_rows() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_run_that_goes_on_when_the_stack_ends_goes_on_after_the_next_up(database: str) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slc-")))
        options = []
        if database == "postgresql":
            options = ["--database-url", stack.enter_context(postgres())]
        sluice = Sluice(folder / "root", folder)
        up = Running(sluice, folder / "root")
        sluice("up", *options)
        try:
            flow_run = up.train("moved", **{"train.num_iterations": 8})
            wait_for(sluice.committed("moved", 1).exists, 200)
            members = up.processes()
            sluice("down")
            _, left = psutil.wait_procs(members, timeout=5)
            assert [p.cmdline() for p in left] == []
            sluice("up")
            sluice("wait", "moved", "--timeout", "200")
            assert up.ended(flow_run)["run_count"] == 2
            assert sluice.json("verify", "moved")["ok"]
        finally:
            sluice("down")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_iteration_and_an_evaluation_beside_a_run(up: Running) -> None:
    up.ended(up.train("steps", **{"train.num_iterations": 1, "checkpoint.save_interval": 1}))
    up.sluice("fork", "steps", "--iter", "0", "--as", "more", "--set", "train.num_iterations=4")
    idle = {p.pid for p in up.processes()}
    done = up.ended(up.begin("rl-iteration/one-shot", run_id="more"))
    assert done["state_type"] == "COMPLETED", done["state"]
    assert up.sluice.committed("more", 1).exists()
    assert not (up.root / "runs" / "more" / "it" / "000002").exists()
    done = up.ended(up.begin("rl-evaluate/checkpoint", run_id="steps"))
    assert done["state_type"] == "COMPLETED", done["state"]
    [manifest] = (up.root / "runs" / "steps" / "evals").glob("*/_MANIFEST.json")
    assert "eval/greedy" in json.loads(manifest.read_text())["metrics"]
    assert up.sluice.json("verify", "steps")["ok"]
    wait_for(lambda: not ours(up, idle), 20)


def ours(up: Running, idle: set[int]) -> list[psutil.Process]:
    """Processes of runs: those that were not there before and are no idle workers of Ray."""
    found = []
    for process in up.processes():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        busy = any("Actor" in w or "prefect.engine" in w or "rlcore." in w for w in words)
        if process.pid not in idle and busy:
            found.append(process)
    return found
