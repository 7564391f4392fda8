"""What the benchmarks share: facts of the machine, the spread of figures, the result file, and the
`sluice` command as a user calls it.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from rlcore.with_parent import with_parent

REPO = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
SLUICE = [sys.executable, "-m", "flows.cli"]
"""The command, installed or not."""
END_S = 30
"""Seconds that a process has to end by itself."""


def machine(*packages: str) -> dict[str, Any]:
    """Facts of the machine, to be taken before anything is measured: its load counts."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "gpus": gpus(),
        **{package: _version(package) for package in packages},
    }


def gpus() -> list[str]:
    """Names of the GPUs."""
    return _ask_driver("name")


def gpu_used_gb() -> list[float]:
    """Memory in use on each GPU, by whomever."""
    return [round(float(mib) * 2**20 / 1e9, 1) for mib in _ask_driver("memory.used")]


def _ask_driver(what: str) -> list[str]:
    """One line a GPU; torch would hold memory of each that it is asked about."""
    ask = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, tail and ends of a list of figures."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "mean": round(statistics.fmean(ordered), 4),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
        "count": len(ordered),
    }


def say(text: str) -> None:
    """Tell how far a long benchmark has come."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def seconds(act: Callable[[], Any]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def sluice(*args: str | Path) -> str:
    """Run the command in its own process, with no Prefect server and no root from outside.

    Returns:
        What it printed.
    """
    done = subprocess.run(
        [*SLUICE, *args], env=own_env(), cwd=REPO, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"sluice {' '.join(map(str, args))} ended with code {done.returncode}")
    return done.stdout


def own_env() -> dict[str, str]:
    """The environment of a command that finds this code, no Prefect server and no root."""
    env = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "SLUICE_ROOT")}
    path = [str(REPO), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def beside(
    argv: Sequence[str | Path], log: Path, **streams: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process for as long as the block lasts; then it and all that descend from it are ended.

    Args:
        argv: its command.
        log: takes what it prints, unless `streams` says otherwise.
        streams: of `subprocess.Popen`.
    """
    with log.open("wb") as out:
        given = {"stdout": out, "stderr": out} | streams
        # A time limit ends this process without a word; it must not leave a run on the GPU.
        command = with_parent([str(part) for part in argv])
        process = subprocess.Popen(command, env=own_env(), cwd=REPO, process_group=0, **given)
        try:
            yield process
        finally:
            _end(process)


def ended(ranks: Sequence[subprocess.Popen[Any]], limit_s: float | None = None) -> list[int | None]:
    """Exit codes of processes that wait for each other, once all have ended or one has failed; then
    none is left.

    Raises:
        TimeoutError: they had not after so many seconds.
    """
    began = time.monotonic()
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            if limit_s is not None and time.monotonic() - began > limit_s:
                raise TimeoutError(f"the ranks have not ended after {limit_s:g} s")
            time.sleep(0.1)
        return codes
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _end(process: subprocess.Popen[Any]) -> None:
    root = psutil.Process(process.pid) if process.poll() is None else None
    tree = [] if root is None else [root, *root.children(recursive=True)]
    if root is not None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    for one in tree:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(tree, timeout=END_S)
    process.wait()


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log, for an error."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def write_config(path: Path, tree: Mapping[str, Mapping[str, Any]]) -> Path:
    """A run's file: sections with their settings."""
    lines = []
    for name, section in tree.items():
        # JSON's strings, numbers, booleans and lists are TOML's too.
        lines += [f"[{name}]", *(f"{key} = {json.dumps(one)}" for key, one in section.items()), ""]
    path.write_text("\n".join(lines))
    return path


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Settings given as KEY=VALUE: a value that is JSON is what it says, any other is text."""
    out: dict[str, Any] = {}
    for one in settings:
        key, _, value = one.partition("=")
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return out


def read_records(root: Path, run_id: str) -> list[dict[str, Any]]:
    """The commit record of every iteration of a run, read as plain files."""
    files = sorted((root / "runs" / run_id / "it").glob("*/_COMMITTED.json"))
    return [json.loads(file.read_text()) for file in files]


def created(record: dict[str, Any]) -> float:
    """When a record was committed, in seconds of the clock on the wall."""
    return datetime.fromisoformat(record["created"]).timestamp()


def keep(result: Mapping[str, Any], path: Path) -> None:
    """Write a result, or what there is of it so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def finish(result: dict[str, Any], path: Path) -> int:
    """Write and show a result.

    Returns:
        The exit code: 0 where the goals are met.
    """
    text = json.dumps(result, indent=2) + "\n"
    keep(result, path)
    sys.stdout.write(text)
    return 0 if result["met"] else 1
