"""One step of RL by Megatron in every layout: the loss and the gradient norm of FSDP2 at one rank.

Ranks are processes with gloo. What cannot run on a CPU is in docs/megatron.md.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_families
from rank_processes import results, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file  # noqa: E402

from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.conversion.sources import HfFolder, Weights  # noqa: E402
from rlcore.models.hf_config import read_hf_config  # noqa: E402
from rlcore.models.tensors import tensors  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402

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
    "pp2-uneven": {PP: 2, "num_layers_in_first_pipeline_stage": 3},
    "tp2-pp2": {TP: 2, PP: 2, "sequence_parallel": True},
    "tp2-cp2": {TP: 2, CP: 2},
    "cp2-dp2": {CP: 2},
    "pp2-ep2": {PP: 2, EP: 2},
    "tp2-ep2": {TP: 2, "sequence_parallel": True, EP: 2, "expert_tensor_parallel_size": 1},
}
DENSE = ("qwen3", "qwen2", "llama", "glm4")
SPARSE = ("qwen3_moe", "glm4_moe", "deepseek_v3")
DEEP = {"qwen3@4": "qwen3", "glm4_moe@4": "glm4_moe"}
"""Of four layers, for two runs of them on each of two stages."""
FAST = [
    *(("qwen3", layout) for layout in ("dp2", "dp2-whole", "tp2", "tp2-sp", "pp2", "cp2")),
    ("qwen3@4", "pp2-vp2"),
    ("qwen3_moe", "ep2"),
    ("deepseek_v3", "tp2-sp"),
]
MORE = [
    *(
        (family, layout)
        for family in DENSE[1:]
        for layout in ("dp2", "tp2", "tp2-sp", "pp2", "cp2")
    ),
    *(
        (family, layout)
        for family in SPARSE
        for layout in ("dp2", "tp2-sp", "pp2", "cp2", "ep2", "tp2-ep2")
        if (family, layout) not in FAST
    ),
    ("glm4_moe@4", "pp2-vp2"),
    ("qwen3@4", "pp2-uneven"),
]
OF_FOUR = [
    *((family, "tp2-pp2") for family in (*DENSE, *SPARSE)),
    ("glm4", "tp2-cp2"),
    ("qwen3", "cp2-dp2"),
    ("glm4_moe", "pp2-ep2"),
]
FIGURES = ("loss", "grad_norm", "entropy", "train_rollout_logprob_abs_diff", "rollout/log_probs")
"""That must agree to 1e-4."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in tiny_families.FAMILIES:
        tiny_families.build(family, folder / family)
    for name, family in DEEP.items():
        tiny_families.build(family, folder / name, layers=4)
    return folder


@pytest.fixture(scope="module")
def batches(toy: Any) -> dict[int, Any]:
    """The same samples, cut for any number of ranks that have some of their own."""
    sequences = toy.random_sequences(10, padding=True)
    return {n: toy.shares(sequences, n, micro_batches=3) for n in (1, 2, 4)}


@pytest.fixture(scope="module")
def expected(process_group: None, models: Path, batches: Any) -> Callable[[str], dict[str, Any]]:
    """FSDP2's figures and log-probs of a family."""

    @cache
    def of(family: str) -> dict[str, Any]:
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
        return {"metrics": metrics, "digest": digest, "log_probs": log_probs}

    return of


def cases(models: Path, batches: Any, table: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{family}-{layout}",
            "model": models / family,
            "layout": LAYOUTS[layout],
            "shares": batches,
        }
        for family, layout in table
    ]


def compare(folder: Path, family: str, layout: str, world: int, want: dict[str, Any]) -> None:
    for got in results(folder, f"{family}-{layout}", world):
        for name in FIGURES:
            assert got["metrics"][name] == pytest.approx(want["metrics"][name], rel=1e-4), name
        for one, other in zip(got["log_probs"], want["log_probs"], strict=True):
            # After a step of AdamW, which makes much of gradients that are next to nothing.
            assert one == pytest.approx(other, abs=2e-3)
        assert got["digest"] == want["digest"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: Path, batches: Any) -> Path:
    """What two ranks do, one case after another."""
    folder = tmp_path_factory.mktemp("pair")
    done = cases(models, batches, FAST)
    done[2] |= {"save": folder / "saved", "export": folder / "exported"}
    done[4] |= {"restore": folder / "saved", "export": folder / "of-stages"}
    done[7] |= {"export": folder / "of-experts"}
    loss = {"custom_loss_function_path": f"{Path(__file__).with_name('own_loss.py')}:loss"}
    for layout in ("tp2-sp", "cp2", "pp2"):
        own = cases(models, batches, [("qwen3", layout)])[0]
        done.append(own | {"name": f"own-loss-{layout}", "algorithm": loss})
    run_ranks(folder, 2, done)
    return folder


@pytest.mark.parametrize(("family", "layout"), FAST)
def test_a_step_is_that_of_fsdp(family: str, layout: str, pair: Path, expected: Any) -> None:
    if (family, layout) == ("qwen3", "pp2"):
        # It went on from the state of another layout.
        saved = results(pair, "qwen3-tp2", 2)[0]["saved"]
        assert all(one["restored"] == saved for one in results(pair, "qwen3-pp2", 2))
        return
    compare(pair, family, layout, 2, expected(family))


@pytest.fixture(scope="module")
def pair_more(tmp_path_factory: pytest.TempPathFactory, models: Path, batches: Any) -> Path:
    folder = tmp_path_factory.mktemp("pair-more")
    run_ranks(folder, 2, cases(models, batches, MORE))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), MORE)
def test_other_families_too(family: str, layout: str, pair_more: Path, expected: Any) -> None:
    compare(pair_more, family, layout, 2, expected(family))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, models: Path, batches: Any) -> Path:
    folder = tmp_path_factory.mktemp("four")
    run_ranks(folder, 4, cases(models, batches, OF_FOUR))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), OF_FOUR)
def test_four_ranks_too(family: str, layout: str, four: Path, expected: Any) -> None:
    compare(four, family, layout, 4, expected(family))


def weights_of(folder: Path) -> dict[str, Any]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("exported", "family"), [("exported", "qwen3"), ("of-experts", "qwen3_moe")]
)
def test_every_weight_is_exported(exported: str, family: str, pair: Path, models: Path) -> None:
    """Near those that training began with, each under its own name."""
    results(pair, "qwen3_moe-ep2", 2)
    arch = read_hf_config(models / family)
    before = Weights(arch, HfFolder(models / family))
    after = weights_of(pair / exported)
    for spec in tensors(arch):
        moved = (after.pop(spec.name) - before.read(spec.name)).abs().max()
        assert 0 < moved < 0.02, spec.name
    assert not after


@pytest.mark.parametrize("layout", ["tp2-sp", "cp2"])
def test_a_loss_of_ones_own_sees_all_logits(layout: str, pair: Path) -> None:
    plain = results(pair, f"qwen3-{layout}", 2)
    own = results(pair, f"own-loss-{layout}", 2)
    for one, other in zip(own, plain, strict=True):
        assert one["metrics"]["grad_norm"] == pytest.approx(other["metrics"]["grad_norm"], rel=1e-4)
        assert one["metrics"]["seen"] == pytest.approx(1.0)
