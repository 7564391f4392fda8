"""The Ray actor that supervises one inference engine: an HTTP server in a process of its own.

The actor only starts, watches and ends the process; requests go to its URL, not through Ray.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.cluster.actor_logs import Line, Lines
from rlcore.cluster.ray_session import own_address
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.engine.options import check_options
from rlcore.engine.sglang import Argument, sglang_argv
from rlcore.net import free_port, free_ports
from rlcore.train.trainer import Lora

log = logging.getLogger("sluice.engine")


MEETING_PORTS = 7
"""Ports that a server takes from the one at which its processes meet, as SGLang counts them."""


@dataclass(frozen=True)
class Part:
    """One node's part of an engine that lies on several."""

    rank: int
    count: int
    meeting: str
    """HOST:PORT of the first one's node."""


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
    gpus: int = 1
    """Of one engine: tensor-parallel x pipeline-parallel size."""
    urls: tuple[str, ...] = ()
    """Engines that somebody else started, in place of ones that are started here."""
    lora: Lora | None = None
    """Of adapters that the engine is to add to its weights."""
    random_seed: int = 0
    start_timeout_s: float = 600.0
    check_interval_s: float = 1.0
    check_timeout_s: float = 15.0
    sglang: dict[str, Argument] = field(default_factory=dict)


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
        self._env = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        self._process: EngineProcess | None = None

    def meeting(self) -> str:
        """Address at which the parts of the engine may meet: of this node, free now."""
        host = own_address()
        return f"{host}:{free_ports(MEETING_PORTS, host)}"

    def start(self, weight_version: str, port: int | None, part: Part | None) -> str:
        """Start the server and wait until it answers.

        Args:
            weight_version: that it reports.
            port: to listen at; None: a free one.
            part: of an engine that lies on several nodes.

        Returns:
            Its URL.

        Raises:
            ConfigError: the server takes no such arguments.
            EngineError: it ended or did not answer in time; the text holds the end of its log.
        """
        spec, host = self._spec, own_address()
        port = port or free_port(host)
        if spec.engine == "sglang":
            argv = self._sglang(weight_version, host, port, part)
        else:
            argv = embedded_argv(
                spec.model_path,
                port,
                host=host,
                dtype=spec.dtype,
                context_length=spec.context_length,
                max_running_requests=spec.max_running_requests,
                random_seed=spec.random_seed,
                weight_version=weight_version,
            )
        self._process = EngineProcess(port, host)
        name = f"engine-{self._rank}" + (f"-node-{part.rank}" if part else "")
        path = Path(spec.log_dir) / f"{name}.log"
        self._process.start(argv, path, self._env)
        self._process.wait_healthy(spec.start_timeout_s)
        log.info("%s engine at %s, log in %s", spec.engine, self._process.url, path)
        return self._process.url

    def _sglang(self, weight_version: str, host: str, port: int, part: Part | None) -> list[str]:
        spec = self._spec
        check_options(spec.sglang)
        own: dict[str, Argument] = {
            "weight_version": weight_version,
            "random_seed": spec.random_seed + self._rank,
        }
        if spec.max_running_requests is not None:
            own["max_running_requests"] = spec.max_running_requests
        if spec.lora is not None:
            own |= {"enable_lora": True, "max_lora_rank": spec.lora.rank}
            own["lora_target_modules"] = list(spec.lora.targets) or ["all"]
        extra = own | spec.sglang
        if part is not None:
            extra |= {"nnodes": part.count, "node_rank": part.rank, "dist_init_addr": part.meeting}
        elif spec.sglang.get("enable_dp_attention"):
            # Its processes meet at ports that follow from this one.
            extra["dist_init_addr"] = self.meeting()
        return sglang_argv(
            spec.model_path,
            port,
            host=host,
            tp=spec.tensor_parallel,
            dtype=spec.dtype,
            context_length=spec.context_length,
            extra=extra,
        )

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
