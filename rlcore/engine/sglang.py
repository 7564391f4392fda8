"""The command line of a real SGLang server."""

import sys
from collections.abc import Mapping
from pathlib import Path

Scalar = bool | int | float | str
Argument = Scalar | list[Scalar]

DETERMINISTIC_ENV = {"SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0"}
"""For deterministic inference: products of matrices by SGLang's Triton kernel. DeepGEMM's wants a
CUDA compiler, and widths that not every vocabulary has."""


def sglang_argv(
    model_path: str | Path,
    port: int,
    *,
    tp: int = 1,
    dtype: str = "auto",
    context_length: int | None = None,
    host: str = "127.0.0.1",
    extra: Mapping[str, Argument] | None = None,
) -> list[str]:
    """`python -m sglang.launch_server ...`.

    `extra` holds further server arguments by name: `chunked_prefill_size = 4096` becomes
    `--chunked-prefill-size 4096`, a list several values, True a flag without value, False nothing.
    """
    arguments: dict[str, Argument | None] = {
        "model_path": str(model_path),
        "host": host,
        "port": port,
        "tp_size": tp,
        "dtype": dtype,
        "context_length": context_length,
    }
    arguments |= {name.replace("-", "_"): value for name, value in (extra or {}).items()}
    return [sys.executable, "-P", "-m", "sglang.launch_server", *options(arguments)]


def options(arguments: Mapping[str, Argument | None]) -> list[str]:
    """Arguments by name as words of a command line."""
    argv = []
    for key, setting in arguments.items():
        if setting is None or setting is False:
            continue
        argv.append(f"--{key.replace('_', '-')}")
        if setting is not True:
            argv += map(str, setting if isinstance(setting, list) else [setting])
    return argv
