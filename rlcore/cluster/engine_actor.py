"""The Ray actor that supervises one inference engine: an HTTP server in a process of its own.

The actor only starts, watches and ends the process; requests go to its URL, not through Ray.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcore.cluster.actor_logs import Line, Lines
from rlcore.engine.launch import HEALTH, EngineProcess, embedded_argv, watched_path
from rlcore.engine.options import check_options
from rlcore.engine.sglang import Argument, sglang_argv
from rlcore.net import free_port, free_ports
from rlcore.train.trainer import Lora
from rlcore.weights.delta.server import MirrorServer, MirrorSpec

log = logging.getLogger("sluice.engine")


MEETING_PORTS = 14
"""Ports that a server takes from the one at which its processes meet, as SGLang counts them, that
of data-parallel attention included.
"""


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
    releases_memory: bool = False
    """It gives its memory back while a trainer works on its GPUs."""
    sglang: dict[str, Argument] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Variables for the server, where they are not set already."""
    mirror: MirrorSpec | None = None
    """Of the weights in the store, where they come from there; `folder` holds those of all."""
    routed_experts: bool = False
    """Whether it tells the experts that tokens were sent to."""


class EngineActor:
    """Owns engine number `rank` of a run."""

    def __init__(
        self,
        spec: EngineSpec,
        rank: int,
        gpus: Sequence[str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """
        Args:
            spec: what the server is started with.
            rank: its number in the run.
            gpus: the server's GPUs, as CUDA_VISIBLE_DEVICES names them; None: those of this actor.
            host: address that it listens at.
        """
        self._lines = Lines()
        self._spec = spec
        self._rank = rank
        self._host = host
        self._env = {k: v for k, v in spec.env.items() if k not in os.environ}
        if gpus is not None:
            self._env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if spec.releases_memory:
            # Else SGLang keeps what its CUDA graphs work with.
            self._env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "true"
            # A router asks for /health, which would generate with memory that was given back.
            self._env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
        self._process: EngineProcess | None = None
        self._watched = HEALTH
        self._mirror: MirrorServer | None = None

    def mirror(self) -> str:
        """The address of the mirror beside the engine; it is started with the first call."""
        assert self._spec.mirror is not None
        if self._mirror is None:
            folder = str(Path(self._spec.mirror.folder) / f"engine-{self._rank}")
            self._mirror = MirrorServer(replace(self._spec.mirror, folder=folder), self._host)
            self._mirror.start()
        return self._mirror.url

    def meeting(self) -> str:
        """Address at which the parts of the engine may meet: of this node, free now."""
        return f"{self._host}:{free_ports(MEETING_PORTS, self._host)}"

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
        spec, host, port = self._spec, self._host, port or free_port(self._host)
        # The other parts of an engine on several nodes answer /health alone.
        self._watched = HEALTH if part is not None and part.rank else watched_path(spec.engine)
        if spec.engine == "sglang":
            argv = self._sglang(weight_version, port, part)
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
                routed_experts=spec.routed_experts,
            )
        self._process = EngineProcess(port, host)
        name = f"engine-{self._rank}" + (f"-node-{part.rank}" if part else "")
        path = Path(spec.log_dir) / f"{name}.log"
        self._process.start(argv, path, self._env)
        self._process.wait_healthy(spec.start_timeout_s)
        if self._watched != HEALTH:
            self._process.keep_loaded()
        log.info("%s engine at %s, log in %s", spec.engine, self._process.url, path)
        return self._process.url

    def _sglang(self, weight_version: str, port: int, part: Part | None) -> list[str]:
        spec = self._spec
        check_options(spec.sglang)
        own: dict[str, Argument] = {
            "weight_version": weight_version,
            "random_seed": spec.random_seed + self._rank,
        }
        if spec.routed_experts:
            own["enable_return_routed_experts"] = True
        if spec.max_running_requests is not None:
            own["max_running_requests"] = spec.max_running_requests
        if spec.releases_memory:
            # slime's setting too: graphs of prefill do not survive a release.
            own |= {"enable_memory_saver": True, "disable_prefill_cuda_graph": True}
            # Those of a draft model come back as they were: nobody sends them.
            own["enable_draft_weights_cpu_backup"] = True
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
            host=self._host,
            tp=spec.tensor_parallel,
            dtype=spec.dtype,
            context_length=spec.context_length,
            extra=extra,
        )

    def lines(self) -> list[Line]:
        """What was logged since the last call."""
        return self._lines.take()

    def probe(self, timeout_s: float, ask: bool = True) -> str | None:
        """What is wrong with the server; None if it runs and, where it is asked, answers within
        `timeout_s` seconds.
        """
        if self._process is None:
            return "it was never started"
        if not self._process.alive():
            return f"its process ended with code {self._process.exit_code}"
        path = self._watched
        if ask and not self._process.answers(timeout_s, path) and self._process.alive():
            return f"it did not answer {path} within {timeout_s:g} s"
        return None

    def stop(self, patience_s: float = 10.0) -> None:
        """End the server process, by force after `patience_s` seconds."""
        if self._process is not None:
            self._process.stop(patience_s)
            self._process = None
