"""The command line of a real server."""

import sys

import pytest

from rlcore.engine.sglang import sglang_argv
from rlcore.errors import ConfigError


def test_settings_and_extras() -> None:
    argv = sglang_argv(
        "/models/m",
        3000,
        tp=2,
        dtype="bfloat16",
        extra={"mem_fraction_static": 0.6, "disable-cuda-graph": True, "enable_metrics": False},
    )
    assert argv[:4] == [sys.executable, "-P", "-m", "sglang.launch_server"]
    options = " ".join(argv[4:])
    assert options == (
        "--model-path /models/m --host 127.0.0.1 --port 3000 --tp-size 2 --dtype bfloat16 "
        "--mem-fraction-static 0.6 --disable-cuda-graph"
    )


def test_an_extra_may_not_contradict_a_setting() -> None:
    with pytest.raises(ConfigError, match="'tp-size'"):
        sglang_argv("/models/m", 3000, extra={"tp-size": 4})
