"""`sluice doctor`: is everything there that a run needs, and if not, what to do.

Each check looks at one thing and never raises: what it cannot find out is its finding.
"""

import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console

from flows.commands.stack import Stack
from flows.commands.wait import prefect_url
from flows.exit_codes import DONE, FAILED
from rlcore.config import RunConfig, load_config
from rlcore.errors import SluiceError
from rlcore.store.objects import Objects

PACKAGES = ("prefect", "ray", "torch", "transformers", "pyarrow", "pydantic")
TIMEOUT_S = 10.0
RAY_TIMEOUT_S = 60.0
LITTLE_DISK, TOO_LITTLE_DISK = 20 * 2**30, 2**30
SKEW_S = 5.0
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}

out = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    name: str
    level: str
    """ok, warn or fail."""
    found: str
    advice: str = ""
    """What to do, where it is not ok."""


def doctor(root: str, config_path: Path | None, *, as_json: bool) -> int:
    """Check everything and print a line each.

    Args:
        root: of the runs.
        config_path: a run's TOML file, whose needs are then checked too.
        as_json: print a JSON list instead.

    Returns:
        1 if something is broken, else 0.
    """
    config, findings = None, []
    if config_path is not None:
        try:
            config = load_config(config_path, [f"storage.root={json.dumps(root)}"])
        except SluiceError as error:
            findings.append(Finding("configuration", "fail", str(config_path), str(error)))
    stack = Stack.load(root)
    use_ray_of(stack)
    for finding in itertools.chain(findings.copy(), examine(root, stack, config)):
        if not as_json:
            say(finding)
        if finding not in findings:
            findings.append(finding)
    if as_json:
        json.dump([asdict(one) for one in findings], sys.stdout, indent=2)
        sys.stdout.write("\n")
    return FAILED if any(one.level == "fail" for one in findings) else DONE


def examine(root: str, stack: Stack, config: RunConfig | None) -> Iterator[Finding]:
    """All findings, in the order in which to read them."""
    yield from versions(config)
    yield gpus(config)
    yield from running(stack)
    yield from prefect_server(prefect_url(root))
    yield ray_cluster(config.cluster.ray_address if config is not None else "auto")
    yield from store(root)
    if config is not None:
        yield run_config(config)


def say(finding: Finding) -> None:
    """Print a finding."""
    colour = COLOURS[finding.level]
    out.print(f"[{colour}]{finding.level:4}[/{colour}] {finding.name:14} ", end="")
    out.print(finding.found, markup=False)
    if finding.advice and finding.level != "ok":
        out.print(f"{'':20}-> {finding.advice}", markup=False)


def use_ray_of(stack: Stack) -> None:
    """Look at the stack's Ray where the environment names none, as the stack's runs do."""
    if stack.alive("ray") and "RAY_ADDRESS" not in os.environ:
        names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
        os.environ.update({name: stack.env()[name] for name in names})


# --- this machine ---------------------------------------------------------------------------------


def versions(config: RunConfig | None) -> Iterator[Finding]:
    """Python and the packages, against what Sluice asks for."""
    yield Finding("python", "ok", platform.python_version())
    asked = {}
    for text in importlib.metadata.requires("sluice-rl") or []:
        one = Requirement(text)
        asked[one.name] = one.specifier
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", "not installed", "install Sluice again: pip install -e .")
            continue
        wanted = asked.get(name)
        if wanted is None or wanted.contains(version, prereleases=True):
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "warn", version, f"Sluice is tested with {name}{wanted}")
    needed = config is not None and config.rollout.engine == "sglang"
    try:
        yield Finding("sglang", "ok", importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        advice = "install the extra `gpu`, or set rollout.engine = 'embedded'"
        yield Finding("sglang", "fail" if needed else "ok", "not installed", advice)


def gpus(config: RunConfig | None) -> Finding:
    """The GPUs of this machine."""
    needed = config is not None and (
        config.rollout.engine == "sglang" or config.cluster.device == "cuda"
    )
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        told = []
    if told:
        return Finding("gpus", "ok", "; ".join(line.strip() for line in told))
    level = "warn" if needed else "ok"
    return Finding("gpus", level, "none here", "the Ray cluster must have those the run asks for")


def running(stack: Stack) -> Iterator[Finding]:
    """The processes that `sluice up` started."""
    if not stack.processes:
        yield Finding("stack", "ok", "none runs; `sluice up` starts one")
        return
    dead = [name for name in stack.processes if not stack.alive(name)]
    if dead:
        yield Finding(
            "stack",
            "fail",
            f"{', '.join(dead)} ended; logs are in {stack.folder / 'logs'}",
            "`sluice up` starts what is missing",
        )
    else:
        yield Finding("stack", "ok", f"{', '.join(stack.processes)} of {stack.folder}")


# --- Prefect --------------------------------------------------------------------------------------


def prefect_server(url: str | None) -> Iterator[Finding]:
    """API, its version, and the websocket that states and events go through."""
    if url is None:
        yield Finding("prefect api", "ok", "none named; `sluice train` starts one of its own")
        return
    import httpx

    try:
        httpx.get(f"{url}/health", timeout=TIMEOUT_S).raise_for_status()
        server = httpx.get(f"{url}/admin/version", timeout=TIMEOUT_S).json()
    except (httpx.HTTPError, ValueError) as error:
        advice = "is the server up, and PREFECT_API_URL right (it ends with /api)?"
        yield Finding("prefect api", "fail", f"{url}: {error or type(error).__name__}", advice)
        return
    client = importlib.metadata.version("prefect")
    if server == client:
        yield Finding("prefect api", "ok", f"{url}, {server}")
    else:
        yield Finding(
            "prefect api",
            "warn",
            f"{url}: the server is {server}, this client {client}",
            "give server, workers and flow runs the same release",
        )
    yield websocket(url)


def websocket(url: str) -> Finding:
    """Whether events reach the server."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    address = url.replace("http", "ws", 1) + "/events/in"
    try:
        with connect(address, open_timeout=TIMEOUT_S, close_timeout=1) as socket:
            socket.ping().wait(TIMEOUT_S)
    except (OSError, TimeoutError, WebSocketException) as error:
        advice = "let the proxy pass websockets; without them task runs do not show on the page"
        return Finding("websocket", "fail", f"{address}: {error}", advice)
    return Finding("websocket", "ok", address)


# --- Ray ------------------------------------------------------------------------------------------

ASK_RAY = """
import json, sys
from rlcore.cluster.ray_session import connect
connect(sys.argv[1])
import ray
print(json.dumps({"version": ray.__version__, **ray.cluster_resources()}))
"""


def ray_cluster(setting: str) -> Finding:
    """Whether the head answers this machine, and what the cluster has."""
    from rlcore.cluster.ray_session import LOCAL, check_head, where_ray_is

    address = where_ray_is(setting)
    if address == LOCAL:
        return Finding("ray", "ok", "each run starts one of its own; $RAY_ADDRESS names none")
    try:
        check_head(address)
        asked = subprocess.run(
            [sys.executable, "-P", "-c", ASK_RAY, address],
            capture_output=True,
            text=True,
            timeout=RAY_TIMEOUT_S,
            check=True,
        )
        has = json.loads(asked.stdout.splitlines()[-1])
    except SluiceError as error:
        return Finding("ray", "fail", address, str(error))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        advice = (
            "the head listens, but this machine cannot join: it needs the same Ray, Python and "
            "token (RAY_AUTH_TOKEN_PATH), and a node of the cluster on it (`ray start --address`)"
        )
        return Finding("ray", "fail", address, advice)
    shown = [f"{has.get(name, 0):g} {name}" for name in ("CPU", "GPU")]
    return Finding("ray", "ok", f"{address}, {has['version']}, {', '.join(shown)}")


# --- the store ------------------------------------------------------------------------------------


def store(root: str) -> Iterator[Finding]:
    """Whether one driver at a time can write, how much room there is, whose clock is right."""
    try:
        objects = Objects.open(root)
        objects.check_writable()
    except SluiceError as error:
        yield Finding("store", "fail", root, str(error))
        return
    yield Finding("store", "ok", f"{root}: writable, with conditional put")
    local = objects.local_path("probe")
    yield disk(local.parent) if local is not None else clock(objects)


def disk(folder: Path) -> Finding:
    """The room that is left where runs are kept."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.1f} GB free at {folder}"
    advice = "`sluice gc` removes what no run needs; checkpoint.keep_last says what each keeps"
    level = "fail" if free < TOO_LITTLE_DISK else "warn" if free < LITTLE_DISK else "ok"
    return Finding("disk", level, found, advice)


def clock(objects: Objects) -> Finding:
    """How far the store's clock is from ours: the age of what gc removes is told by it."""
    key = f"clock-{os.getpid()}-{time.time_ns()}"
    try:
        before = time.time()
        objects.put(key, b"")
        after = time.time()
        info = objects.filesystem.info(f"{objects.root.partition('://')[2]}/{key}")
        theirs = info["LastModified"].timestamp()
    except (SluiceError, OSError, KeyError, AttributeError) as error:
        return Finding("clock", "ok", f"the store does not tell its own ({type(error).__name__})")
    finally:
        with suppress(SluiceError):
            objects.delete(key)
    # The store tells whole seconds.
    skew = max(before - theirs - 1, theirs - after, 0.0)
    advice = "let both follow one time server"
    return Finding("clock", "warn" if skew > SKEW_S else "ok", f"{skew:.1f} s from ours", advice)


# --- the run --------------------------------------------------------------------------------------


def run_config(config: RunConfig) -> Finding:
    """All that `sluice train` checks before it starts."""
    from rlcore.opening import named
    from rlcore.preflight import preflight

    try:
        preflight(named(config, None, "doctor"))
    except SluiceError as error:
        return Finding("configuration", "fail", "sluice train would refuse it", str(error))
    return Finding("configuration", "ok", "sluice train would start it")
