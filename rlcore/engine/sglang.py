"""The command line of a real SGLang server."""

import sys
from collections.abc import Mapping
from pathlib import Path

from rlcore.errors import ConfigError

Scalar = bool | int | float | str

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
    extra: Mapping[str, Scalar] | None = None,
) -> list[str]:
    """`python -m sglang.launch_server ...`.

    `extra` holds further server arguments by name: `chunked_prefill_size = 4096` becomes
    `--chunked-prefill-size 4096`, True a flag without value, False nothing. ConfigError for a name
    that has a setting of its own.
    """
    arguments: dict[str, Scalar | None] = {
        "model_path": str(model_path),
        "host": host,
        "port": port,
        "tp_size": tp,
        "dtype": dtype,
        "context_length": context_length,
    }
    for name, value in (extra or {}).items():
        key = name.replace("-", "_")
        if key in arguments:
            raise ConfigError(
                f"The SGLang argument '{name}' cannot be given as an extra: it is set from the "
                "run's own settings."
            )
        arguments[key] = value
    argv = [sys.executable, "-P", "-m", "sglang.launch_server"]
    for key, setting in arguments.items():
        option = f"--{key.replace('_', '-')}"
        if setting is None or setting is False:
            continue
        argv += [option] if setting is True else [option, str(setting)]
    return argv
