"""The command line of a real server."""

import sys

from rlcore.engine.sglang import sglang_argv


def test_settings_and_extras() -> None:
    argv = sglang_argv(
        "/models/m",
        3000,
        tp=2,
        dtype="bfloat16",
        extra={
            "mem_fraction_static": 0.6,
            "disable-cuda-graph": True,
            "enable_metrics": False,
            "cuda_graph_bs_decode": [8, 64],
        },
    )
    assert argv[:4] == [sys.executable, "-P", "-m", "sglang.launch_server"]
    options = " ".join(argv[4:])
    assert options == (
        "--model-path /models/m --host 127.0.0.1 --port 3000 --tp-size 2 --dtype bfloat16 "
        "--mem-fraction-static 0.6 --disable-cuda-graph --cuda-graph-bs-decode 8 64"
    )
