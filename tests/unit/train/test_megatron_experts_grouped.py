"""Experts that are multiplied together come to what they come to one after another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_families
from rank_processes import results, run_ranks
from tiny_trainers import loaded

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch.nn import functional  # noqa: E402

from rlcore.config.tree import AlgorithmConfig  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.megatron.experts import GroupedExperts, together, weights_of  # noqa: E402
from rlcore.train.megatron.trainer import MegatronTrainer  # noqa: E402

TP, EP = "tensor_model_parallel_size", "expert_model_parallel_size"
TOGETHER = {"moe_grouped_gemm": True}
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {EP: 2},
    "tp2-ep2": {TP: 2, "sequence_parallel": True, EP: 2, "expert_tensor_parallel_size": 1},
    "tp2-sp": {TP: 2, "sequence_parallel": True},
}
FIGURES = ("loss", "grad_norm", "entropy", "rollout/log_probs")
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        tiny_families.build(family, folder / family)
    return folder


@pytest.fixture
def make(process_group: None, models: Path) -> Make:
    """A loaded trainer of one rank."""

    def trainer(model: str | Path, kind: Any = MegatronTrainer, **more: Any) -> Any:
        table = {} if kind is FsdpTrainer else {"megatron": TOGETHER}
        return loaded(kind, models / model, AlgorithmConfig(), **table | more)

    return trainer


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is multiplied together."""
    seen: list[Any] = []
    real = functional.grouped_mm

    def watched(x: Any, whole: Any, **more: Any) -> Any:
        seen.append(whole.shape)
        return real(x, whole, **more)

    monkeypatch.setattr(functional, "grouped_mm", watched)
    return seen


def batch_of(toy: Any) -> Any:
    return toy.shares(toy.random_sequences(9), 1, micro_batches=3)[0]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_moe", {}),
        ("glm4_moe", {"precision": "bfloat16"}),
        ("deepseek_v3", {"gradient_checkpointing": True}),
    ],
)
def test_a_step_is_that_of_experts_one_after_another(
    family: str, more: Any, toy: Any, make: Make, products: list[Any], tmp_path: Path
) -> None:
    apart, joined = make(family, megatron={}, **more), make(family, **more)
    assert joined.digest() == apart.digest()
    want = apart.train("start", "next", batch_of(toy)).metrics
    assert not products
    got = joined.train("start", "next", batch_of(toy)).metrics
    assert products
    tolerance = 1e-2 if more.get("precision") else 1e-4
    for name in FIGURES:
        assert got[name] == pytest.approx(want[name], rel=tolerance), name
    joined.save_state(tmp_path / "state")
    joined.offload()
    joined.onload()
    assert apart.load_state(tmp_path / "state", "next") == joined.digest()
    joined.load_state(tmp_path / "state", "next")
    for module in joined._policy.chunks[0].modules():
        if isinstance(module, GroupedExperts):
            # Where the optimizer writes.
            for weights in map(weights_of, (module.first, module.second)):
                assert together(weights).data_ptr() == weights[0].data_ptr()


def test_who_waits_for_weights_is_asked(toy: Any, make: Make) -> None:
    """As megatron-core does, which gathers weights while others compute."""
    trainer, asked = make("qwen3_moe"), []
    for module in trainer._policy.chunks[0].modules():
        if isinstance(module, GroupedExperts):
            for projection in (*module.first, *module.second):
                projection.register_forward_pre_hook(lambda one, _: asked.append(one))
    trainer.log_probs([[1, 2, 3]])
    assert len(asked) == len(set(asked)) == 2 * 2 * 4


def test_what_does_not_fit_is_computed_one_after_another(
    toy: Any, make: Make, products: list[Any], tmp_path: Path
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "norm_topk_prob": True}
    folder = toy.write_model(tmp_path / "m", "qwen3_moe", moe_intermediate_size=30, **sizes)
    got = make(folder).train("start", "next", batch_of(toy)).metrics
    want = make(folder, megatron={}).train("start", "next", batch_of(toy)).metrics
    assert not products
    assert got["grad_norm"] == want["grad_norm"]


def test_weights_are_seen_where_they_lie_if_they_lie_evenly() -> None:
    memory = torch.randn(200)
    even = [memory[4 + 60 * k :][:12].view(3, 4) for k in range(3)]
    assert together(even).data_ptr() == even[0].data_ptr()
    for weights in (even, even[::-1], [even[0], *even], [*even, torch.randn(3, 4)], even[:1]):
        assert torch.equal(together(weights), torch.stack(weights))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: Path, toy: Any) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    cases = [
        {
            "name": f"{family}-{layout}",
            "model": models / family,
            "layout": LAYOUTS[layout] | TOGETHER,
            "shares": {n: toy.shares(toy.random_sequences(9), n, micro_batches=3) for n in (1, 2)},
        }
        for family in ("qwen3_moe", "glm4_moe")
        for layout in LAYOUTS
    ]
    run_ranks(folder, 2, cases)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_two_ranks(family: str, layout: str, pair: Path, make: Make, toy: Any) -> None:
    want = make(family, FsdpTrainer).train("start", "next", batch_of(toy)).metrics
    for got in results(pair, f"{family}-{layout}", 2):
        for name in FIGURES:
            assert got["metrics"][name] == pytest.approx(want[name], rel=1e-4), name
