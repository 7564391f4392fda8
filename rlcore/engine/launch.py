"""Engine processes: start one, wait until it answers, end it.

Invariants:
- An engine never outlives its parent: the kernel sends it SIGKILL when the thread that called
  `start` ends (Linux; call it from one that lasts), and it leads a process group of its own, which
  `stop` ends as a whole.
- A start that fails says why: the error carries the last lines of the engine's log and where it
  lies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPResponse
from pathlib import Path

from rlcore.errors import EngineError
from rlcore.with_parent import with_parent

LOG_TAIL_LINES = 20
POLL_SECONDS = 0.05
HEALTH = "/health"
KEEP_LOADED_S = 30.0


def embedded_argv(
    model_path: str | Path,
    port: int,
    *,
    host: str = "127.0.0.1",
    dtype: str = "float32",
    device: str = "cpu",
    threads: int = 1,
    max_running_requests: int | None = None,
    context_length: int | None = None,
    random_seed: int = 0,
    weight_version: str | None = None,
    routed_experts: bool = False,
) -> list[str]:
    """The command of an embedded engine."""
    argv = [sys.executable, "-P", "-m", "rlcore.engine.embedded"]
    argv += ["--model-path", str(model_path), "--host", host, "--port", str(port)]
    argv += ["--dtype", dtype, "--device", device, "--threads", str(threads)]
    argv += ["--random-seed", str(random_seed)]
    if max_running_requests is not None:
        argv += ["--max-running-requests", str(max_running_requests)]
    if context_length is not None:
        argv += ["--context-length", str(context_length)]
    if weight_version is not None:
        argv += ["--weight-version", weight_version]
    if routed_experts:
        argv.append("--enable-return-routed-experts")
    return argv


class EngineProcess:
    """One engine server as a child process. `host` and `port` are those in its command."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.url = f"http://{host}:{port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_path: Path | None = None

    @property
    def pid(self) -> int | None:
        """The process id, None before `start`."""
        return None if self._process is None else self._process.pid

    def start(
        self, argv: Sequence[str], log_path: str | Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Run `argv` with the variables of `env` added to ours; output is appended to
        `log_path`.
        """
        if self.alive():
            raise EngineError(f"The engine at {self.url} runs already (pid {self.pid}).")
        self._log_path = Path(log_path)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    with_parent(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    # Not a session: Linux would weigh it as a whole against all else of ours.
                    process_group=0,
                )
            except OSError as error:
                raise EngineError(f"{argv[0]} could not be started: {error}.") from error

    @property
    def exit_code(self) -> int | None:
        """How the process ended; negative: the signal. None if it runs or never did."""
        return None if self._process is None else self._process.poll()

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def keep_loaded(self) -> None:
        """Have all processes of SGLang do what `rlcore.collector.keep_loaded` does; EngineError if
        it does not say that it does.
        """
        try:
            open_directly(f"{self.url}/freeze_gc", KEEP_LOADED_S).close()
        except (urllib.error.URLError, OSError) as error:
            raise EngineError(
                f"The engine at {self.url} does not answer /freeze_gc: {error}. {self._log_tail()}"
            ) from error

    def answers(self, timeout: float = 5.0, path: str = HEALTH) -> bool:
        """Whether `path` answers 200 within `timeout` seconds."""
        return answers(self.url, timeout, path)

    def wait_healthy(self, timeout: float) -> None:
        """Return once /health answers 200; EngineError, with the end of the log, if the process
        ends before or `timeout` seconds pass.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.alive():
                code = None if self._process is None else self._process.returncode
                raise EngineError(
                    f"The engine at {self.url} ended with exit code {code} before it was ready. "
                    f"{self._log_tail()}"
                )
            if self.answers():
                return
            time.sleep(POLL_SECONDS)
        raise EngineError(
            f"The engine at {self.url} did not answer /health within {timeout:g} s. "
            f"{self._log_tail()}"
        )

    def stop(self, timeout: float = 10.0) -> None:
        """End the process group: SIGTERM, and SIGKILL after `timeout` seconds. Does nothing
        twice.
        """
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        # Also after a clean end: children of a real server may live on in the group.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()

    def _log_tail(self) -> str:
        if self._log_path is None or not self._log_path.is_file():
            return "It wrote no log."
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"The end of {self._log_path}:\n" + "\n".join(lines)


def _signal_group(pid: int, number: signal.Signals) -> None:
    # Nothing may be left of the group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def visible_gpu(number: int) -> str:
    """What CUDA_VISIBLE_DEVICES of a process that is started calls a GPU that we see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[number] if seen else str(number)


def watched_path(engine: str) -> str:
    """What an engine that works is asked, again and again, to see that it still does.

    SGLang's scheduler has to answer /server_info, and does at once. Its /health makes a token and
    answers a second later; a pause that comes meanwhile waits a second more for that token.
    """
    return "/server_info" if engine == "sglang" else HEALTH


def answers(url: str, timeout: float, path: str = HEALTH) -> bool:
    """Whether `path` of an engine answers 200 within `timeout` seconds."""
    try:
        with open_directly(f"{url}{path}", timeout) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def open_directly(url: str, timeout: float) -> HTTPResponse:
    """GET, without the proxies of the environment: engines are within a cluster.

    Raises:
        URLError, OSError: no answer, or one that says no.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    response: HTTPResponse = opener.open(url, timeout=timeout)
    return response
