"""PPO's critic and a reference that follows, by Megatron on real GPUs: the figures of FSDP2 on one,
and states that either backend reads, whatever the layout.

Each case runs in processes of its own, one a GPU; what they find is printed.
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
TP, PP, CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {TP: 2},
    "tp2-sp": {TP: 2, "sequence_parallel": True},
    "pp2": {PP: 2},
    "cp2": {CP: 2},
}
PPO = {
    "advantage_estimator": "ppo",
    "kl_coef": 0.3,
    "critic_lr": 5e-3,
    "use_rollout_logprobs": True,
    "ref_update_interval": 1,
}
FIGURES = ("loss", "grad_norm", "value_loss", "critic_grad_norm", "rollout/values")
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
NEAR_0 = {"float32": 1e-5, "bfloat16": 2e-3}
"""Values begin around 0."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_families.build("qwen3", folder, layers=4)
    return folder


def case(model: Path, name: str, layout: dict[str, Any], **train: Any) -> dict[str, Any]:
    sequences = random_sequences(10)
    return {
        "name": name,
        "model": model,
        "layout": layout,
        "shares": {n: shares(sequences, n, micro_batches=3) for n in (1, 2)},
        "algorithm": PPO,
        "train": train,
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Both backends on one GPU; then Megatron from the state that FSDP2 saved."""
    folder = tmp_path_factory.mktemp("alone")
    for precision in TOLERANCE:
        state = folder / f"state-{precision}"
        other = case(model, "fsdp", {}, backend="fsdp", precision=precision) | {"save": state}
        run_ranks(folder / f"{precision}-fsdp", 1, [other], "cuda")
        own = case(model, "megatron", {}, precision=precision)
        again = own | {"name": "again", "restore": state}
        run_ranks(folder / f"{precision}-megatron", 1, [own, again], "cuda")
    return folder


def compare(got: dict[str, float], want: dict[str, float], precision: str) -> None:
    for name in FIGURES:
        print(f"{name}: {got[name]:.7g}, FSDP2 {want[name]:.7g}")
    for name in FIGURES:
        assert got[name] == pytest.approx(
            want[name], rel=TOLERANCE[precision], abs=NEAR_0[precision]
        ), name


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_step_on_one_gpu_is_that_of_fsdp(precision: str, alone: Path) -> None:
    [want] = results(alone / f"{precision}-fsdp", "fsdp", 1)
    [got] = results(alone / f"{precision}-megatron", "megatron", 1)
    compare(got["metrics"], want["metrics"], precision)
    [again] = results(alone / f"{precision}-megatron", "again", 1)
    assert again["restored"] == want["saved"]


@pytest.mark.skipif(GPUS < 2, reason=f"two CUDA devices are needed; there are {GPUS}")
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_on_two_gpus_is_that_of_fsdp(
    layout: str, precision: str, alone: Path, model: Path, tmp_path: Path
) -> None:
    [want] = results(alone / f"{precision}-fsdp", "fsdp", 1)
    first = case(model, "first", LAYOUTS[layout], precision=precision)
    again = first | {"name": "again", "restore": alone / f"state-{precision}"}
    run_ranks(tmp_path / "ranks", 2, [first, again], "cuda")
    for got in results(tmp_path / "ranks", "first", 2):
        compare(got["metrics"], want["metrics"], precision)
    for got in results(tmp_path / "ranks", "again", 2):
        assert got["restored"] == want["saved"]
