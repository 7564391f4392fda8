"""Two nodes of Ray on one machine, each in a network namespace of its own with a cable between.

Each has its own loopback and its own ports, as two machines have; they share the file system. Needs
root and `ip`; `why_not` says what lacks.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from real_runs import wait_for
from s3_servers import KEY, SECRET

from rlcore.net import free_port

START_S = 600.0
HEAD_PORT = 6379
S3_PORT = 5000
MAKE_BUCKET = """
import os, boto3
boto3.client(
    "s3",
    endpoint_url=os.environ["FSSPEC_S3_ENDPOINT_URL"],
    aws_access_key_id=os.environ["FSSPEC_S3_KEY"],
    aws_secret_access_key=os.environ["FSSPEC_S3_SECRET"],
    region_name="us-east-1",
).create_bucket(Bucket="runs")
"""
OBJECT_STORE = 100 * 2**20


@dataclass(frozen=True)
class Namespace:
    """A network namespace with one address."""

    name: str
    address: str

    @property
    def within(self) -> tuple[str, ...]:
        """What runs a command there."""
        return ("ip", "netns", "exec", self.name)

    def pids(self) -> list[int]:
        """Processes that are there."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """SIGKILL all that runs there, as a machine would go that loses power."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class TwoNodes:
    """A Ray head and a second node."""

    first: Namespace
    second: Namespace
    folder: Path
    """Of Ray, its token and its logs; short, since sockets lie below."""

    @property
    def env(self) -> dict[str, str]:
        """Of all that is to be let in."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_TMPDIR": str(self.folder),
            "RAY_worker_niceness": "0",
            "FSSPEC_S3_KEY": KEY,
            "FSSPEC_S3_SECRET": SECRET,
            "FSSPEC_S3_ENDPOINT_URL": f"http://{self.first.address}:{S3_PORT}",
        }

    @property
    def ray_address(self) -> str:
        """Of the head."""
        return f"{self.first.address}:{HEAD_PORT}"

    def start_head(self) -> None:
        """Start Ray on the first node."""
        own = ["--head", "--port", str(HEAD_PORT), "--include-dashboard", "false"]
        self._start(self.first, [*own, "--temp-dir", str(self.folder / "ray")])

    def start_second(self) -> None:
        """Start Ray on the second node."""
        self._start(self.second, ["--address", self.ray_address])

    def start_s3(self) -> None:
        """Start an S3 server on the first node, with the bucket `runs`."""
        moto = str(Path(sys.executable).with_name("moto_server"))
        argv = [*self.first.within, moto, "-H", self.first.address, "-p", str(S3_PORT)]
        with (self.folder / "s3.log").open("wb") as log:
            subprocess.Popen(argv, stdout=log, stderr=log)
        make = [*self.first.within, sys.executable, "-c", MAKE_BUCKET]
        wait_for(lambda: subprocess.run(make, env=os.environ | self.env).returncode == 0, START_S)

    def _start(self, node: Namespace, own: list[str]) -> None:
        argv = [*node.within, sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block"]
        argv += ["--node-ip-address", node.address, "--disable-usage-stats", "--num-cpus", "1"]
        argv += ["--object-store-memory", str(OBJECT_STORE), *own]
        path = self.folder / f"{node.name}-{free_port()}.log"
        with path.open("wb") as log:
            subprocess.Popen(
                argv,
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )
        wait_for(lambda: b"Ray runtime started" in path.read_bytes(), START_S)


@cache
def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (iproute2)"
    name = f"slp{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Namespaces, cable and Ray; all of it is gone afterwards."""
    number = os.getpid()
    net = f"10.213.{number % 250}"
    first = Namespace(f"sl{number}a", f"{net}.1")
    second = Namespace(f"sl{number}b", f"{net}.2")
    folder = Path(tempfile.mkdtemp(prefix="slt-", dir="/tmp"))
    (folder / "token").write_text(os.urandom(32).hex())
    nodes = TwoNodes(first, second, folder)
    made: list[Namespace] = []
    try:
        for node in (first, second):
            _ip("netns", "add", node.name)
            made.append(node)
            _ip("-n", node.name, "link", "set", "lo", "up")
        ends = [f"v{node.name}" for node in made]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for node, end in zip(made, ends, strict=True):
            _ip("link", "set", end, "netns", node.name)
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", end)
            _ip("-n", node.name, "link", "set", end, "up")
        nodes.start_head()
        nodes.start_second()
        yield nodes
    finally:
        for node in made:
            node.kill()
            _ip("netns", "del", node.name)
        shutil.rmtree(folder, ignore_errors=True)


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], check=True, capture_output=True, text=True)
    return done.stdout
