"""Overlap of Megatron's distributed optimizer on GPUs: two steps come to the numbers of steps in
which nothing overlaps, with masters in the host's memory too; a state goes on at another layout.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny_families
from rank_processes import results, run_ranks
from toy_batches import random_sequences, shares

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(GPUS == 0, reason="no CUDA device"),
]
SMALL = {"ddp_bucket_size": 2000}
HOST = {"optimizer_cpu_offload": True}
CP, EP = "context_parallel_size", "expert_model_parallel_size"
WAYS: dict[str, dict[str, Any]] = {
    "off": {"layout": {"overlap_grad_reduce": False}},
    "overlap": {"layout": SMALL},
    "bfloat16-gradients": {"layout": SMALL | {"grad_reduce_in_fp32": False}},
    "on-host": {"layout": SMALL, "train": HOST},
}
LAYOUTS = {1: {"one": {}}, 2: {"dp2": {}, "cp2": {CP: 2}, "ep2": {EP: 2}}}
FIGURES = ("loss", "grad_norm", "entropy")


def check(world: int, layout: str, precision: str, folder: Path) -> None:
    family = "qwen3_moe" if layout == "ep2" else "qwen3"
    tiny_families.build(family, folder / "model", layers=4)
    sequences = random_sequences(16)
    batch = {n: shares(sequences, n, num_steps=2, micro_batches=2) for n in (1, 2)}
    cases = [
        {
            "name": way,
            "model": folder / "model",
            "shares": batch,
            "layout": LAYOUTS[world][layout] | how["layout"],
            "train": {"precision": precision, "lr": 1e-4} | how.get("train", {}),
            "save": folder / f"state-{way}",
        }
        for way, how in WAYS.items()
    ]
    cases.append(cases[0] | {"name": "resumed", "restore": folder / "state-overlap"})
    run_ranks(folder / "ranks", world, cases, "cuda")
    want = results(folder / "ranks", "off", world)[0]["metrics"]
    loose = {"float32": 1e-4, "bfloat16": 3e-2}[precision]
    for way in WAYS:
        got = results(folder / "ranks", way, world)[0]["metrics"]
        print(world, layout, precision, way, {name: got[name] for name in FIGURES})
        for name in FIGURES:
            assert got[name] == pytest.approx(want[name], rel=loose), (way, name)
    saved = results(folder / "ranks", "overlap", world)[0]["saved"]
    assert results(folder / "ranks", "resumed", world)[0]["restored"] == saved


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_gpu(precision: str, tmp_path: Path) -> None:
    check(1, "one", precision, tmp_path)


@pytest.mark.skipif(GPUS < 2, reason=f"two CUDA devices are needed; there are {GPUS}")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_two_gpus(layout: str, precision: str, tmp_path: Path) -> None:
    check(2, layout, precision, tmp_path)
