"""The command line of a real server."""

import sys

import pytest

from rlcore.cluster.engine_actor import EngineActor, EngineSpec
from rlcore.engine.sglang import sglang_argv
from rlcore.train.trainer import Lora


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


@pytest.mark.parametrize(
    ("targets", "said"), [((), "all"), (("q_proj", "up_proj"), "q_proj up_proj")]
)
def test_a_server_that_adds_adapters_is_told_of_them(targets: tuple[str, ...], said: str) -> None:
    spec = EngineSpec("sglang", "/m", "/logs", lora=Lora(8, 16.0, targets), random_seed=3)
    options = " ".join(EngineActor(spec, 2)._sglang("0", 3000, None))
    assert f"--enable-lora --max-lora-rank 8 --lora-target-modules {said}" in options
    assert "--weight-version 0 --random-seed 5" in options


def test_a_draft_model_s_weights_outlive_a_release() -> None:
    spec = EngineSpec("sglang", "/m", "/logs", releases_memory=True)
    options = " ".join(EngineActor(spec, 0)._sglang("0", 3000, None))
    assert "--enable-memory-saver" in options
    assert "--enable-draft-weights-cpu-backup" in options
