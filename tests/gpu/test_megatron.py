"""The Megatron trainer on real GPUs, next to FSDP2 on one: a step of RL comes to the same numbers.

Cases run in processes of their own, one a GPU; what they find is printed.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
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
TWO = pytest.mark.skipif(GPUS < 2, reason=f"two CUDA devices are needed; there are {GPUS}")

TP, SP, EP = "tensor_model_parallel_size", "sequence_parallel", "expert_model_parallel_size"
PP, CP, VP = (
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
GROUPED = "moe_grouped_gemm"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {},
    "tp2": {TP: 2},
    "tp2-sp": {TP: 2, SP: True},
    "pp2": {PP: 2},
    "pp2-vp2": {PP: 2, VP: 2},
    "cp2": {CP: 2},
    "ep2": {EP: 2},
    "together": {GROUPED: True},
    "ep2-together": {EP: 2, GROUPED: True},
    "tp2-ep2-together": {TP: 2, SP: True, EP: 2, "expert_tensor_parallel_size": 1, GROUPED: True},
}
SPARSE = ("qwen3_moe", "glm4_moe", "deepseek_v3")
ONE = [
    (family, precision)
    for family in tiny_families.FAMILIES
    for precision in ("float32", "bfloat16")
]
TWO_GPUS = [
    *(
        ("qwen3", layout, precision)
        for layout in ("dp2", "tp2", "tp2-sp", "pp2", "pp2-vp2", "cp2")
        for precision in ("float32", "bfloat16")
    ),
    ("qwen3_moe", "ep2", "float32"),
    ("deepseek_v3", "tp2-sp", "float32"),
    *(
        (family, layout, precision)
        for family in SPARSE
        for layout in ("ep2-together", "tp2-ep2-together")
        for precision in ("float32", "bfloat16")
    ),
]
Ran = Callable[[str, str], Path]
"""Runs a family in a precision, once; the folder of what the ranks say."""
FIGURES = ("loss", "grad_norm", "entropy", "rollout/log_probs")
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in tiny_families.FAMILIES:
        tiny_families.build(family, folder / family, layers=4)
    print("megatron-core", version("megatron-core"), "torch", torch.__version__)
    return folder


def case(models: Path, family: str, layout: str, precision: str, backend: str) -> dict[str, Any]:
    sequences = random_sequences(10)
    return {
        "name": f"{backend}-{family}-{layout}-{precision}",
        "model": models / family,
        "layout": dict(LAYOUTS[layout]),
        "shares": {n: shares(sequences, n, micro_batches=3) for n in (1, 2)},
        "train": {
            "backend": backend,
            "precision": precision,
            # Every family in bfloat16, and one in float32, as torch compiles it.
            "torch_compile": precision == "bfloat16" or family == "qwen3",
        },
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Ran:
    """Both backends on one GPU, when somebody asks for it."""
    folder = tmp_path_factory.mktemp("one")

    @cache
    def ran(family: str, precision: str) -> Path:
        made = [case(models, family, "one", precision, kind) for kind in ("fsdp", "megatron")]
        run_ranks(folder / f"{family}-{precision}", 1, made, "cuda")
        return folder / f"{family}-{precision}"

    return ran


def wanted(one: Ran, family: str, precision: str) -> dict[str, float]:
    folder, name = one(family, precision), f"fsdp-{family}-one-{precision}"
    metrics: dict[str, float] = results(folder, name, 1)[0]["metrics"]
    return metrics


def compare(got: dict[str, float], want: dict[str, float], precision: str) -> None:
    for name in FIGURES:
        print(f"{name}: {got[name]:.7g}, FSDP2 {want[name]:.7g}")
    for name in FIGURES:
        assert got[name] == pytest.approx(want[name], rel=TOLERANCE[precision]), name


@pytest.mark.parametrize(("family", "precision"), ONE)
def test_a_step_on_one_gpu_is_that_of_fsdp(family: str, precision: str, one: Ran) -> None:
    folder = one(family, precision)
    got = results(folder, f"megatron-{family}-one-{precision}", 1)[0]
    compare(got["metrics"], wanted(one, family, precision), precision)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("family", SPARSE)
def test_experts_together_come_to_what_they_do_apart(
    family: str, precision: str, one: Ran, models: Path, tmp_path: Path
) -> None:
    made = case(models, family, "together", precision, "megatron")
    # What is computed again must find the tokens that it had.
    made["train"] |= {"gradient_checkpointing": True}
    run_ranks(tmp_path / "ranks", 1, [made], "cuda")
    got, want = results(tmp_path / "ranks", made["name"], 1)[0], wanted(one, family, precision)
    compare(got["metrics"], want, precision)
    for name in (name for name in want if name.startswith("moe/") and precision == "float32"):
        assert got["metrics"][name] == pytest.approx(want[name], abs=0.1), name


@TWO
@pytest.mark.parametrize("family", SPARSE)
def test_replayed_experts_on_two_gpus(family: str, models: Path, tmp_path: Path) -> None:
    """Three steps through the experts of the old policy, with losses of routers and moving biases
    where there are any: nothing waits for ever, and ranks agree.
    """
    made = case(models, family, "tp2-ep2-together", "bfloat16", "megatron")
    more = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    if family != "qwen3_moe":
        more["moe_router_bias_update_rate"] = 0.001
    made["layout"] |= more
    made["train"] |= {"gradient_checkpointing": True, "use_routing_replay": True}
    made["shares"] = {
        n: shares(random_sequences(12), n, micro_batches=2, num_steps=3) for n in (1,)
    }
    run_ranks(tmp_path / "ranks", 2, [made], "cuda")
    found = [got["metrics"] for got in results(tmp_path / "ranks", made["name"], 2)]
    print({k: v for k, v in found[0].items() if k in FIGURES or k.startswith("moe/")})
    assert all(found[0][name] == found[1][name] for name in FIGURES)


@TWO
@pytest.mark.parametrize(("family", "layout", "precision"), TWO_GPUS)
def test_a_step_on_two_gpus_is_that_of_fsdp(
    family: str, layout: str, precision: str, one: Ran, models: Path, tmp_path: Path
) -> None:
    made = case(models, family, layout, precision, "megatron")
    run_ranks(tmp_path / "ranks", 2, [made], "cuda")
    for got in results(tmp_path / "ranks", made["name"], 2):
        compare(got["metrics"], wanted(one, family, precision), precision)
