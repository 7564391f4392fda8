"""The Ray actor that supervises one inference engine: an HTTP server in a process of its own.

The actor only starts, watches and ends the process; requests go to its URL, not through Ray.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcore.cluster.actor_logs import Line, Lines
from rlcore.config.tree import Scalar
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.engine.sglang import sglang_argv
from rlcore.net import free_port
from rlcore.weights.delta.server import MirrorServer, MirrorSpec

log = logging.getLogger("sluice.engine")


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is started with."""

    engine: str
    model_path: str
    log_dir: str
    dtype: str = "float32"
    context_length: int | None = None
    max_running_requests: int | None = None
    tensor_parallel: int = 1
    random_seed: int = 0
    start_timeout_s: float = 600.0
    check_interval_s: float = 1.0
    check_timeout_s: float = 15.0
    sglang: dict[str, Scalar] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Variables for the server, where they are not set already."""
    mirror: MirrorSpec | None = None
    """Of the weights in the store, where they come from there; `folder` holds those of all."""


class EngineActor:
    """Owns engine number `rank` of a run."""

    def __init__(self, spec: EngineSpec, rank: int, gpus: Sequence[str] | None = None) -> None:
        """
        Args:
            spec: what the server is started with.
            rank: its number in the run.
            gpus: the server's GPUs, as CUDA_VISIBLE_DEVICES names them; None: those of this actor.
        """
        self._lines = Lines()
        self._spec = spec
        self._rank = rank
        self._env = {k: v for k, v in spec.env.items() if k not in os.environ}
        if gpus is not None:
            self._env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._process: EngineProcess | None = None
        self._mirror: MirrorServer | None = None

    def mirror(self) -> str:
        """The address of the mirror beside the engine; it is started with the first call."""
        assert self._spec.mirror is not None
        if self._mirror is None:
            folder = str(Path(self._spec.mirror.folder) / f"engine-{self._rank}")
            self._mirror = MirrorServer(replace(self._spec.mirror, folder=folder))
            self._mirror.start()
        return self._mirror.url

    def start(self, weight_version: str, port: int | None) -> str:
        """Start the server and wait until it answers.

        Args:
            weight_version: that it reports.
            port: to listen at; None: a free one.

        Returns:
            Its URL.

        Raises:
            EngineError: it ended or did not answer in time; the text holds the end of its log.
        """
        spec, port = self._spec, port or free_port()
        if spec.engine == "sglang":
            own: dict[str, Scalar] = {
                "weight_version": weight_version,
                "random_seed": spec.random_seed + self._rank,
            }
            if spec.max_running_requests is not None:
                own["max_running_requests"] = spec.max_running_requests
            argv = sglang_argv(
                spec.model_path,
                port,
                tp=spec.tensor_parallel,
                dtype=spec.dtype,
                context_length=spec.context_length,
                extra=own | spec.sglang,
            )
        else:
            argv = embedded_argv(
                spec.model_path,
                port,
                dtype=spec.dtype,
                context_length=spec.context_length,
                max_running_requests=spec.max_running_requests,
                random_seed=spec.random_seed,
                weight_version=weight_version,
            )
        self._process = EngineProcess(port)
        path = Path(spec.log_dir) / f"engine-{self._rank}.log"
        self._process.start(argv, path, self._env)
        self._process.wait_healthy(spec.start_timeout_s)
        log.info("%s engine at %s, log in %s", spec.engine, self._process.url, path)
        return self._process.url

    def lines(self) -> list[Line]:
        """What was logged since the last call."""
        return self._lines.take()

    def probe(self, timeout_s: float) -> str | None:
        """What is wrong with the server; None if it runs and answers within `timeout_s` seconds."""
        if self._process is None:
            return "it was never started"
        if not self._process.alive():
            return f"its process ended with code {self._process.exit_code}"
        if not self._process.answers(timeout_s) and self._process.alive():
            return f"it did not answer /health within {timeout_s:g} s"
        return None

    def stop(self, patience_s: float = 10.0) -> None:
        """End the server process, by force after `patience_s` seconds."""
        if self._process is not None:
            self._process.stop(patience_s)
            self._process = None
