"""An engine for a benchmark: SGLang on a GPU, else the embedded one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks._common import own_env, say
from rlcore.engine.launch import EngineProcess, embedded_argv, visible_gpu
from rlcore.engine.sglang import sglang_argv
from rlcore.net import free_port

START_S = 400.0
SGLANG: dict[str, bool | int | float | str] = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
    "cuda_graph_max_bs_decode": 256,
    "mem_fraction_static": 0.25,
}
"""What the GPU benchmarks have in common; seen to start in about two minutes."""


@contextmanager
def serving(
    model: Path,
    log: Path,
    *,
    sglang: Mapping[str, bool | int | float | str] | None,
    context: int,
    gpu: int | None = None,
) -> Iterator[str]:
    """The URL of an engine that answers; its weights have version 0.

    Args:
        model: folder.
        log: of the server.
        sglang: more of its arguments; None: the embedded engine.
        context: longest sequence.
        gpu: number of its GPU; None: the first.
    """
    port = free_port()
    if sglang is None:
        argv = embedded_argv(model, port, context_length=context, weight_version="0")
    else:
        extra = {**sglang, "weight_version": "0"}
        argv = sglang_argv(model, port, dtype="bfloat16", context_length=context, extra=extra)
    engine = EngineProcess(port)
    say(f"starting the engine: {' '.join(argv)}")
    env = {"PYTHONPATH": own_env()["PYTHONPATH"]}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible_gpu(gpu)
    engine.start(argv, log, env)
    try:
        engine.wait_healthy(START_S)
        if sglang is not None:
            engine.keep_loaded()
        say("the engine answers")
        yield engine.url
    finally:
        engine.stop()
