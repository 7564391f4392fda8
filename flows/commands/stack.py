"""`sluice up` and `sluice down`: a local stack that runs in the background.

A Prefect server with its page, scheduler and automations; a Ray head; a worker of the process pool;
and Sluice's deployments. Invariants:
- `stack.json` names every process by id and start time; `down` ends these and what descends from
  them, and nothing else.
- Everything listens on loopback alone, and Ray asks for the token in the stack's folder.
- `up` starts what does not run, so that calling it again mends a stack that lost a process.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from flows.exit_codes import DONE
from flows.operation.daemon import Daemon, end, send, wait_until_it_says
from flows.operation.deploy import apply_automations, apply_deployments, apply_pool, check, shipped
from flows.operation.server import empty_database, server_argv, server_env
from rlcore.cluster.ray_session import STARTS
from rlcore.errors import ClusterError, ConfigError
from rlcore.net import free_port

POOL = "sluice-local"
DEPLOYMENTS = ("local", "one-shot", "checkpoint", "artifacts")
"""Those of the local pool, by name: `prefect deploy` does not match the flows of module paths."""
USUAL_PORT = 4200
START_TIMEOUT_S = 180.0
FLOWS_PATIENCE_S = 15.0
"""Seconds that flow runs have, when the stack ends, to free what they hold and say so."""
PATIENCE_S = 5.0
OBJECT_STORE_BYTES = 256 * 2**20
"""Only small records pass through Ray's object store."""

out = Console(highlight=False, soft_wrap=True)


@dataclass
class Stack:
    """A stack on this machine, as its folder records it."""

    folder: Path
    root: str
    home: str = ""
    """Where `up` was called: relative paths in the parameters of a flow run start there."""
    api_url: str = ""
    database_url: str = ""
    ray_address: str = ""
    ray_temp: str = ""
    processes: dict[str, Daemon] = field(default_factory=dict)

    @classmethod
    def load(cls, root: str) -> "Stack":
        """The stack of a root; one without processes if there is none."""
        folder = stack_folder(root)
        file = folder / "stack.json"
        try:
            record = json.loads(file.read_text())
            processes = {name: Daemon(**one) for name, one in record.pop("processes").items()}
            return cls(folder=folder, processes=processes, **record)
        except FileNotFoundError:
            return cls(folder, root)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} is torn ({error}): end what runs of the stack by hand, and remove it"
            ) from None

    def save(self) -> None:
        """Write the record, in one step."""
        record = {
            name: getattr(self, name)
            for name in ("root", "home", "api_url", "database_url", "ray_address", "ray_temp")
        }
        record["processes"] = {name: one.record() for name, one in self.processes.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        making = self.folder / "stack.json.new"
        making.touch(mode=0o600)
        making.write_text(json.dumps(record, indent=2) + "\n")
        making.replace(self.folder / "stack.json")

    def alive(self, name: str) -> bool:
        """Whether one of its processes runs."""
        return name in self.processes and self.processes[name].alive()

    @property
    def page(self) -> str:
        """The address of Prefect's page."""
        return self.api_url.removesuffix("/api")

    @property
    def queue(self) -> str:
        """The work queue of this root: a worker of another root's stack, which outlived its server
        and finds this one at the same address, takes nothing from it.
        """
        return f"root-{hashlib.sha256(self.root.encode()).hexdigest()[:8]}"

    @property
    def token(self) -> Path:
        """The file with Ray's token."""
        return self.folder / "ray.token"

    def env(self) -> dict[str, str]:
        """What a process of this stack finds in its environment."""
        env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PREFECT_API_URL": self.api_url,
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "SLUICE_ROOT": self.root,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        env.pop("PREFECT_API_KEY", None)
        if self.ray_address:
            env |= {
                "RAY_ADDRESS": self.ray_address,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self.token),
            }
        return env


def up(root: str, *, database_url: str | None = None, ray: bool = True) -> int:
    """Start what does not run of the root's stack, deploy, and say where everything is.

    Args:
        root: of the runs.
        database_url: `postgresql+asyncpg://...` of Prefect's server; None: SQLite in the folder.
        ray: start a Ray head; without one each run has a private Ray.

    Raises:
        ClusterError: a process did not come up; those that did still run, see `down`.
    """
    with locked(root):
        stack = Stack.load(root)
        if database_url and stack.alive("server") and database_url != stack.database_url:
            raise ConfigError("the stack runs with another database; `sluice down` first")
        wanted = ["server", *(["ray"] if ray else []), "worker"]
        missing = [name for name in wanted if not stack.alive(name)]
        if not missing:
            out.print(f"the stack of {root} runs already; deploying again")
        stack.home = stack.home if stack.alive("worker") else str(Path.cwd())
        before = stack.database_url
        stack.database_url = database_url or before
        try:
            start(stack, missing)
        except ClusterError:
            if not stack.alive("server"):
                # What did not come up is not tried again unasked.
                stack.database_url = before
                stack.save()
            raise
        say(stack)
    return DONE


def start(stack: Stack, names: list[str]) -> None:
    """Start these processes of a stack, and deploy to it."""
    server = None
    if "server" in names:
        server = start_server(stack)
        out.print(f"starting Prefect's server at {stack.page}")
    if "ray" in names:
        bring_up_ray(stack)
    if server is not None:
        wait_for_server(stack)
    deploy(stack)
    if "worker" in names:
        adopt_orphans(stack)
        start_worker(stack)


def start_server(stack: Stack) -> Daemon:
    """Start Prefect's server, at the port that it had before if that is free."""
    port = pick_port(stack.api_url, USUAL_PORT)
    stack.api_url = f"http://127.0.0.1:{port}/api"
    home = stack.folder / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    database = home / "prefect.db"
    # Named from its own folder: a database URL has no way to say '%', '?' or '#' in a path.
    url = stack.database_url or f"sqlite+aiosqlite:///{database.name}"
    if not stack.database_url and not database.exists() and empty_database().exists():
        shutil.copyfile(empty_database(), database)
    env = server_env(home, stack.api_url, url)
    return launch(stack, "server", server_argv(port), env, cwd=home)


def wait_for_server(stack: Stack) -> None:
    """Wait until the server answers."""
    server = stack.processes["server"]
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.alive():
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{stack.api_url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise ClusterError(f"Prefect's server at {stack.api_url} did not start. {server.tail()}")


def bring_up_ray(stack: Stack) -> None:
    """Start a Ray head and wait until it is ready. Ray gives its own processes 30 seconds, which no
    setting changes: on a busy machine it is begun again.
    """
    for attempt in range(STARTS):
        head = start_ray(stack)
        if attempt == 0:
            out.print(f"starting a Ray head at {stack.ray_address}")
        try:
            wait_until_it_says(head, "Ray runtime started", START_TIMEOUT_S, "the Ray head")
            return
        except ClusterError:
            if head.alive() or attempt + 1 == STARTS:
                raise


def start_ray(stack: Stack) -> Daemon:
    """Start a Ray head with its own folder, ports and token."""
    # A worker that lives on knows the address that it was started with.
    port = pick_port(stack.ray_address)
    stack.ray_address = f"127.0.0.1:{port}"
    if stack.ray_temp:
        # Of a head that died.
        end(of_folder(stack.ray_temp), PATIENCE_S)
        shutil.rmtree(stack.ray_temp, ignore_errors=True)
    # Ray's sockets lie below, and their paths may have no more than about a hundred characters.
    stack.ray_temp = tempfile.mkdtemp(prefix="sluice-ray-")
    if not stack.token.exists():
        stack.folder.mkdir(parents=True, exist_ok=True)
        stack.token.touch(mode=0o600)
        stack.token.write_text(secrets.token_hex(32))
    # Ray's workers would run at nice 15: behind Prefect's server wherever cores are few.
    env = stack.env() | {"RAY_worker_niceness": "0", "RAY_TMPDIR": stack.ray_temp}
    env.pop("RAY_ADDRESS", None)
    return launch(stack, "ray", head_argv(port, stack.ray_temp), env)


def head_argv(port: int, temp: str) -> list[str]:
    """The command of a Ray head that listens here alone, with its files in a folder."""
    argv = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    argv += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", temp]
    argv += ["--include-dashboard", "false", "--disable-usage-stats"]
    argv += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
    for name in (
        "ray-client-server-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    ):
        argv += [f"--{name}", str(free_port())]
    return argv


def adopt_orphans(stack: Stack) -> None:
    """Have flow runs of the last worker that have no process any more started again.

    Nobody else would see it soon, after a machine went down. As after any crash each is the same
    flow run again; one that was being cancelled is cancelled.
    """
    alive = set()
    for process in flow_processes(stack.api_url):
        with contextlib.suppress(psutil.Error):
            alive.add(process.environ().get("PREFECT__FLOW_RUN_ID"))
    query = {
        "flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}},
        "work_pools": {"name": {"any_": [POOL]}},
    }
    with httpx.Client(base_url=stack.api_url, timeout=30) as api:
        for run in check(api.post("/flow_runs/filter", json=query), "flow runs").json():
            if run["id"] in alive:
                continue
            ending = run["state_type"] == "CANCELLING"
            state = {
                "type": "CANCELLED" if ending else "SCHEDULED",
                "name": "Cancelled" if ending else "AwaitingRetry",
                "message": "Its process was gone when `sluice up` looked for it.",
            }
            body = {"state": state, "force": True}
            check(api.post(f"/flow_runs/{run['id']}/set_state", json=body), run["name"])
            done = "is cancelled" if ending else "is started again"
            out.print(f"{run['name']} had lost its process and {done}")


def start_worker(stack: Stack) -> None:
    """Start the worker, and wait until the server knows it."""
    # -P: nothing is imported from the folder where `up` happened to be called.
    argv = [sys.executable, "-P", "-m", "prefect", "worker", "start", "--type", "process"]
    argv += ["--pool", POOL, "--name", POOL, "--work-queue", stack.queue]
    worker = launch(stack, "worker", argv, stack.env())
    query = {"workers": {"status": {"any_": ["ONLINE"]}}}
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and worker.alive():
        answer = httpx.post(f"{stack.api_url}/work_pools/{POOL}/workers/filter", json=query)
        if answer.status_code == 200 and answer.json():
            return
        time.sleep(0.2)
    raise ClusterError(f"the worker did not start. {worker.tail()}")


def launch(
    stack: Stack, name: str, argv: list[str], env: dict[str, str], cwd: Path | None = None
) -> Daemon:
    """Start a process of the stack and put it on record at once."""
    log = stack.folder / "logs" / f"{name}.log"
    stack.processes[name] = Daemon.start(argv, env, log, cwd=cwd or Path(stack.home))
    stack.save()
    return stack.processes[name]


def deploy(stack: Stack) -> None:
    """Apply pool, deployments and automations."""
    apply_pool(stack.api_url, POOL, "process")
    places = {
        "SLUICE_ROOT": stack.root,
        "SLUICE_HOME": stack.home,
        "SLUICE_EXAMPLES": str(shipped("examples")),
        "SLUICE_QUEUE": stack.queue,
    }
    apply_deployments(stack.api_url, DEPLOYMENTS, places, stack.folder / "prefect")
    apply_automations(stack.api_url)


def say(stack: Stack) -> None:
    """Print where everything is and what to do next."""
    out.print(f"[bold]Prefect[/bold]   {stack.page}")
    out.print(f"[bold]Ray[/bold]       {stack.ray_address or 'private to each run'}")
    out.print(f"[bold]runs[/bold]      {stack.root}")
    out.print(f"[bold]logs[/bold]      {stack.folder / 'logs'}")
    out.print("start a run from the page (Deployments, rl-train/local, Run), or:")
    out.print(f"  export PREFECT_API_URL={stack.api_url} SLUICE_ROOT={shlex.quote(stack.root)}")
    out.print("  prefect deployment run rl-train/local --watch \\", markup=False)
    out.print(
        """    --param 'overrides={"run.id": "first", "train.num_iterations": 10}'""", markup=False
    )
    out.print("  sluice wait first")
    out.print("look at it: sluice doctor; end it: sluice down")


def down(root: str) -> int:
    """End the root's stack: its worker with the flow runs, its Ray, its server."""
    if not stack_folder(root).is_dir():
        out.print(f"no stack of {root} runs")
        return DONE
    with locked(root):
        stack = Stack.load(root)
        members = {name: one.family() for name, one in stack.processes.items()}
        worker, *flows = members.get("worker") or [None]
        if orphans := flow_processes(stack.api_url):
            # A worker that was killed leaves the flow runs that it had begun.
            flows = list({process.pid: process for process in [*flows, *orphans]}.values())
            members["worker"] = [*([worker] if worker is not None else []), *flows]
        if not any(members.values()):
            out.print(f"no stack of {root} runs")
        workers = [worker] if worker is not None else []
        # A stopped worker takes no new flow run; one that ends now would not see how those of its
        # own end, and a run that says that it crashed is started again at the next `up`.
        send(workers, signal.SIGSTOP)
        send(flows, signal.SIGTERM)
        psutil.wait_procs(flows, timeout=FLOWS_PATIENCE_S)
        send([*flows, *workers], signal.SIGKILL)
        ray = [*members.get("ray", []), *of_folder(stack.ray_temp)]
        end(ray, PATIENCE_S)
        end(of_folder(stack.ray_temp), PATIENCE_S)
        end(members.get("server", []), PATIENCE_S)
        if stack.ray_temp:
            shutil.rmtree(stack.ray_temp, ignore_errors=True)
        stack.processes, stack.ray_address, stack.ray_temp = {}, "", ""
        if stack.folder.is_dir():
            stack.save()
        out.print("ended: " + (", ".join(name for name, m in members.items() if m) or "nothing"))
    return DONE


def of_folder(folder: str) -> list[psutil.Process]:
    """The processes whose command names this folder, which was made for one Ray head alone."""
    found = []
    for process in psutil.process_iter() if folder else ():
        with contextlib.suppress(psutil.Error):
            if any(folder in word for word in process.cmdline()):
                found.append(process)
    return found


def stack_folder(root: str) -> Path:
    """Where a stack keeps its record, logs and database: in a local root, else in the home."""
    local = root.removeprefix("file://")
    if "://" not in local:
        return Path(local) / "stack"
    tag = hashlib.sha256(root.encode()).hexdigest()[:12]
    return Path.home() / ".local" / "share" / "sluice" / f"stack-{tag}"


def pick_port(before: str, *usual: int) -> int:
    """A port for a server: the one that it had, a usual one, or any that is free."""
    had = [int(port) for port in re.findall(r":(\d+)", before)]
    for port in (*had, *usual):
        with contextlib.suppress(OSError):
            return free_port(port=port)
    return free_port()


def flow_processes(api_url: str) -> list[psutil.Process]:
    """Processes of this user that run a flow of a server, and all that descend from them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            engine = "prefect.engine" in process.cmdline()
            if api_url and engine and process.environ().get("PREFECT_API_URL") == api_url:
                found += [process, *process.children(recursive=True)]
    return found


@contextlib.contextmanager
def locked(root: str) -> Iterator[None]:
    """One `up` or `down` of a root at a time.

    Raises:
        ConfigError: another is at work.
    """
    folder = stack_folder(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise ConfigError(f"a stack cannot be kept in {folder}: {error}") from None
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another `sluice up` or `sluice down` of {root} is at work"
            ) from None
        yield
