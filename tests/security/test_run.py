"""One real run on a real S3 server, looked at from outside while it works and after.

It starts in a folder full of modules that pose as others, with secrets in its environment.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fsspec.config
import psutil
import pytest
from real_runs import Sluice, short, wait_for
from s3_servers import SECRET, seaweed_server

from rlcore.store.objects import Objects
from rlcore.store.paths import committed_key

POSERS = ("uvicorn", "rlcore", "prefect", "sglang", "aiohttp", "httpx", "numpy", "quickstart")
ELSEWHERE = {"OTHER_SERVICE_PASSWORD": "pl4nted-other-s3cret"}


@dataclass
class Watched:
    """What was seen of a run."""

    folder: Path
    output: str = ""
    listening: set[tuple[str, str]] = field(default_factory=set)
    """(process, address) of every TCP socket that took connections."""
    friend: str = ""
    """What a Ray client with the run's token was told."""
    stranger: str = ""
    """What one with another token was told."""
    store: dict[str, bytes] = field(default_factory=dict)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("run")
    # Ray's sockets have long names.
    with tempfile.TemporaryDirectory(prefix="sls-", dir="/tmp") as temp:
        seen = Watched(folder)
        for name in ("weed", "cwd", "home"):
            (folder / name).mkdir()
        for poser in POSERS:
            mark = folder / f"imported-{poser}"
            (folder / "cwd" / f"{poser}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
        with seaweed_server(folder / "weed") as server, pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "s3", server.conf)
            env = server.env(folder / "home") | ELSEWHERE | {"RAY_TMPDIR": temp, "TMPDIR": temp}
            sluice = Sluice("s3://runs/secure", cwd=folder / "cwd", env=env)
            objects = Objects.open("s3://runs/secure")
            seen_it = folder / "seen-it"
            reward = held_reward(folder, until=seen_it)
            config = short(folder, iterations=3, more="state_interval = 1\n" + reward)
            process = start_safely(sluice, config)
            wait_for(lambda: objects.exists(committed_key("s", 0)), 200)
            seen.listening = listening(process.pid)
            other = folder / "other-token"
            other.write_text("0" * 64)
            seen.friend = join_ray(process.pid, folder / "home" / ".ray" / "auth_token", folder)
            seen.stranger = join_ray(process.pid, other, folder)
            seen_it.touch()
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, out + err
            seen.output = out + err
            seen.store = {key: objects.get(key) for key in objects.list("runs")}
            copy_tree(Path(temp), folder / "temp")
        yield seen


def held_reward(folder: Path, until: Path) -> str:
    """The quickstart's reward, which from the second iteration on waits until a file is there."""
    (folder / "held.py").write_text(
        "import os, time\n"
        "def reward(args, sample):\n"
        f"    while sample.index >= 64 and not os.path.exists({str(until)!r}): time.sleep(0.05)\n"
        "    return float(sample.response.startswith(sample.label))\n"
    )
    path = f"{folder / 'held.py'}:reward"
    return f'[reward]\ncustom_rm_path = "{path}"\ntimeout_s = 300'


def start_safely(sluice: Sluice, config: Path) -> "subprocess.Popen[str]":
    """As the console script starts: without the working folder on the path."""
    env = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | sluice.env
    script = str(Path(sys.executable).with_name("sluice"))
    argv = [script, "train", str(config), "--run-id", "s", "--root", str(sluice.root)]
    return subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=sluice.cwd
    )


def listening(pid: int) -> set[tuple[str, str]]:
    """What a process and all its descendants listen on, looked at for a while."""
    found = set()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.add((process.name(), connection.laddr.ip))
            except psutil.Error:
                continue
        time.sleep(0.3)
    return found


def join_ray(pid: int, token: Path, folder: Path) -> str:
    """Join the run's private Ray as somebody who has that token."""
    gcs = next(
        process
        for process in psutil.Process(pid).children(recursive=True)
        if process.name() == "gcs_server"
    )
    port = next(c.laddr.port for c in gcs.net_connections("tcp") if c.status == "LISTEN")
    code = f"import ray; ray.init(address='127.0.0.1:{port}'); print('joined')"
    env = os.environ | {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token"}
    env |= {"HOME": str(folder / "stranger"), "RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
    # Else Ray would ask at the machine's own address, where nobody listens.
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired as late:
        return f"{(late.stdout or b'').decode()} {(late.stderr or b'').decode()}"
    return done.stdout + done.stderr


def copy_tree(source: Path, target: Path) -> None:
    """Keep the files of a folder: Ray's are gone when its session is."""
    for path in source.rglob("*"):
        if path.is_file() and not path.is_symlink():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())


def files_with(folder: Path, secret: bytes, but: tuple[str, ...] = ()) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and path.relative_to(folder).parts[0] not in but
        and secret in path.read_bytes()
    ]


@pytest.mark.timeout(600)
def test_a_secret_of_the_environment_is_written_nowhere(run: Watched) -> None:
    for secret in (SECRET, *ELSEWHERE.values()):
        assert secret not in run.output
        assert [key for key, data in run.store.items() if secret.encode() in data] == []
        # `weed` is the server, which keeps the accounts it was given. What is left: Prefect's
        # database and log, caches, the session logs of Ray.
        assert files_with(run.folder, secret.encode(), but=("weed",)) == []
    looked_at = {path.suffix for path in run.folder.rglob("*") if path.is_file()}
    assert {".db", ".log"} <= looked_at
    assert any("logs" in path.parts for path in (run.folder / "temp").rglob("*.log"))


@pytest.mark.timeout(600)
def test_everything_listens_on_loopback_alone(run: Watched) -> None:
    assert len(run.listening) > 5
    loopback = ("127.", "::1", "::ffff:127.")
    assert [entry for entry in run.listening if not entry[1].startswith(loopback)] == []


@pytest.mark.timeout(600)
def test_rays_door_is_closed_to_who_has_no_token(run: Watched) -> None:
    assert "joined" in run.friend
    assert "joined" not in run.stranger


@pytest.mark.timeout(600)
def test_nothing_was_imported_from_the_working_folder(run: Watched) -> None:
    assert list(run.folder.glob("imported-*")) == []
