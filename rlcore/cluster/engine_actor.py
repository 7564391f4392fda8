"""The Ray actor that supervises one inference engine: an HTTP server in a process of its own.

The actor only starts, watches and ends the process; requests go to its URL, not through Ray.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rlcore.config.tree import Scalar
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.engine.sglang import sglang_argv
from rlcore.net import free_port


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
    sglang: dict[str, Scalar] = field(default_factory=dict)


class EngineActor:
    """Owns engine number `rank` of a run."""

    def __init__(self, spec: EngineSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._process: EngineProcess | None = None

    def start(self, weight_version: str) -> str:
        """Start the server and wait until it answers.

        Returns:
            Its URL.

        Raises:
            EngineError: it ended or did not answer in time; the text holds the end of its log.
        """
        spec, port = self._spec, free_port()
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
        self._process.start(argv, Path(spec.log_dir) / f"engine-{self._rank}.log")
        self._process.wait_healthy(spec.start_timeout_s)
        return self._process.url

    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.alive()

    def stop(self) -> None:
        """End the server process."""
        if self._process is not None:
            self._process.stop()
            self._process = None
