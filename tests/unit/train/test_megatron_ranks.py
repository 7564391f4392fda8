"""One step of RL by Megatron in every layout: the loss and the gradient norm of FSDP2 at one rank.

Ranks are processes with gloo. What cannot run on a CPU is in docs/megatron.md.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_families

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402

RANK = Path(__file__).with_name("megatron_rank.py")
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, CP = "expert_model_parallel_size", "context_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-whole": {"use_distributed_optimizer": False},
    "tp2": {TP: 2},
    "tp2-sp": {TP: 2, "sequence_parallel": True},
    "pp2": {PP: 2},
    "cp2": {CP: 2},
    "ep2": {EP: 2},
    "pp2-vp2": {PP: 2, "virtual_pipeline_model_parallel_size": 2},
    "tp2-pp2": {TP: 2, PP: 2, "sequence_parallel": True},
    "tp2-cp2": {TP: 2, CP: 2},
    "cp2-dp2": {CP: 2},
    "pp2-ep2": {PP: 2, EP: 2},
    "tp2-ep2": {TP: 2, "sequence_parallel": True, EP: 2, "expert_tensor_parallel_size": 1},
}
DENSE = ("qwen3", "qwen2", "llama", "glm4")
SPARSE = ("qwen3_moe", "glm4_moe", "deepseek_v3")
CASES = [
    *((family, layout) for family in DENSE for layout in ("dp2", "tp2", "tp2-sp", "pp2", "cp2")),
    ("qwen3", "dp2-whole"),
    *(
        (family, layout)
        for family in SPARSE
        for layout in ("dp2", "tp2-sp", "pp2", "ep2", "tp2-ep2")
    ),
    ("qwen3_moe", "cp2"),
    ("glm4_moe", "cp2"),
]
FIGURES = ("loss", "grad_norm", "entropy", "train_rollout_logprob_abs_diff", "rollout/log_probs")
"""That must agree to 1e-4."""


def run_ranks(folder: Path, world: int, cases: list[dict[str, Any]]) -> None:
    """All cases on fresh ranks, one after another."""
    folder.mkdir(exist_ok=True)
    (folder / "job").write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-W", "ignore", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), folder, folder / "job"])
        for rank in range(world)
    ]
    for rank in ranks:
        rank.wait(500)


def results(folder: Path, name: str, world: int) -> list[dict[str, Any]]:
    """What each rank says of a case."""
    found = []
    for rank in range(world):
        file = folder / f"{name}.{rank}"
        assert file.exists(), f"rank {rank} did not come to {name}: a case before it failed"
        out = pickle.loads(file.read_bytes())
        assert isinstance(out, dict), out
        found.append(out)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in tiny_families.FAMILIES:
        tiny_families.build(family, folder / family)
    return folder


@pytest.fixture(scope="module")
def batches(toy: Any) -> dict[int, Any]:
    """The same samples, cut for any number of ranks that have some of their own."""
    sequences = toy.random_sequences(10)
    return {n: toy.shares(sequences, n, micro_batches=3) for n in (1, 2, 4)}


@pytest.fixture(scope="module")
def expected(process_group: None, models: Path, batches: Any) -> Iterator[dict[str, Any]]:
    """FSDP2's figures and log-probs by family."""
    out = {}
    for family in tiny_families.FAMILIES:
        trainer = FsdpTrainer(
            TrainConfig(lr=1e-2, num_iterations=4),
            AlgorithmConfig(),
            temperature=1.0,
            seed=0,
            device="cpu",
        )
        trainer.load(models / family, "start")
        digest = trainer.digest()
        metrics = trainer.train("start", "next", batches[1][0]).metrics
        log_probs = trainer.log_probs([[1, 2, 3], [5, 4, 3, 2]])
        out[family] = {"metrics": metrics, "digest": digest, "log_probs": log_probs}
    yield out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: Path, batches: Any) -> Path:
    """All cases on two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    cases = [
        {
            "name": f"{family}-{layout}",
            "model": models / family,
            "layout": LAYOUTS[layout],
            "shares": batches,
        }
        for family, layout in CASES
    ]
    run_ranks(folder, 2, cases)
    return folder


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_step_is_that_of_fsdp(family: str, layout: str, pair: Path, expected: Any) -> None:
    want = expected[family]
    for got in results(pair, f"{family}-{layout}", 2):
        for name in FIGURES:
            assert got["metrics"][name] == pytest.approx(want["metrics"][name], rel=1e-4), name
        for one, other in zip(got["log_probs"], want["log_probs"], strict=True):
            assert one == pytest.approx(other, abs=2e-3)
