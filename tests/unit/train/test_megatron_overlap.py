"""Gradients added up during backward and weights gathered during forward: the numbers of a step in
which nothing overlaps, and of FSDP2.

Two optimizer steps of two micro-batches, in buckets that hold a weight or two: with the second step
megatron-core sends a bucket off as soon as it is full.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_families
from rank_processes import results, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.errors import ConfigError  # noqa: E402
from rlcore.train.fsdp.trainer import FsdpTrainer  # noqa: E402
from rlcore.train.megatron import stepping  # noqa: E402
from rlcore.train.megatron.settings import Settings  # noqa: E402

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, CP = "expert_model_parallel_size", "context_parallel_size"
VP = "virtual_pipeline_model_parallel_size"
SMALL = {"ddp_bucket_size": 2000}
OFF = {"overlap_grad_reduce": False}
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"layout": SMALL},
    "gather-later": {"layout": SMALL | {"overlap_param_gather": False}},
    "off": {"layout": OFF},
    "whole": {"layout": SMALL | {"use_distributed_optimizer": False}},
    "on-host": {"layout": SMALL, "train": {"optimizer_cpu_offload": True}},
    "compiled": {"layout": SMALL, "compiled": True},
}
OF_TWO = {"dp2": ("qwen3", {}), "cp2": ("qwen3", {CP: 2})}
OF_FOUR = {
    "tp2-dp2": ("qwen3", {TP: 2, "sequence_parallel": True}),
    "pp2-dp2": ("qwen3", {PP: 2}),
    "vp2-dp2": ("qwen3@4", {PP: 2, VP: 2}),
    "ep2-dp2": ("qwen3_moe", {EP: 2}),
    "cp2-dp2": ("qwen3", {CP: 2}),
}
STEADY = {"lr": 1e-4, "clip_grad": 100.0}
"""A step of AdamW makes much of gradients that are next to nothing: a small one, for the second. No
clipping: norms differ by their last bits, as other elements are added up first."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in ("qwen3", "qwen3_moe"):
        tiny_families.build(family, folder / family)
    tiny_families.build("qwen3", folder / "qwen3@4", layers=4)
    return folder


@pytest.fixture(scope="module")
def batches(toy: Any) -> dict[int, Any]:
    sequences = toy.random_sequences(16)
    return {n: toy.shares(sequences, n, num_steps=2, micro_batches=2) for n in (1, 2, 4)}


@pytest.fixture(scope="module")
def expected(process_group: None, models: Path, batches: Any) -> Any:
    @cache
    def of(family: str) -> dict[str, Any]:
        trainer = FsdpTrainer(
            TrainConfig(num_iterations=4, **STEADY),
            AlgorithmConfig(),
            temperature=1.0,
            seed=0,
            device="cpu",
        )
        trainer.load(models / family, "start")
        return dict(trainer.train("start", "next", batches[1][0]).metrics)

    return of


def cases(models: Path, batches: Any, layouts: dict[str, Any], ways: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{layout}-{way}",
            "model": models / family,
            "shares": batches,
            "layout": table | WAYS[way]["layout"],
            "train": STEADY | WAYS[way].get("train", {}),
            "again": True,
            "compiled": WAYS[way].get("compiled", False),
        }
        for layout, (family, table) in layouts.items()
        for way in ways
    ]


def compare(folder: Path, layout: str, ways: Any, world: int, want: dict[str, Any]) -> None:
    plain = results(folder, f"{layout}-off", world)
    for way in ways:
        for got, other in zip(results(folder, f"{layout}-{way}", world), plain, strict=True):
            for name in ("loss", "grad_norm"):
                assert got["metrics"][name] == pytest.approx(want[name], rel=1e-4), (way, name)
            if way in ("overlap", "compiled"):
                # The first step finds out what there is to wait for.
                assert got["early"] == [False, True], way
            if world == 2 and way != "compiled":
                # Of two ranks a sum is the same in whatever order it is made.
                assert got["after"] == other["after"], way
                assert got["log_probs"] == other["log_probs"], way


def ways_of(layout: str) -> list[str]:
    """Of two ranks: those that share sequences are compiled among the slow layouts."""
    return [way for way in WAYS if (layout, way) != ("cp2", "compiled")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: Path, batches: Any) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    chosen: list[dict[str, Any]] = []
    for layout, told in OF_TWO.items():
        chosen += cases(models, batches, {layout: told}, ways_of(layout))
    run_ranks(folder, 2, chosen)
    return folder


@pytest.mark.parametrize("layout", OF_TWO)
def test_overlap_changes_nothing(layout: str, pair: Path, expected: Any) -> None:
    compare(pair, layout, ways_of(layout), 2, expected(OF_TWO[layout][0]))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, models: Path, batches: Any) -> Path:
    folder = tmp_path_factory.mktemp("four")
    run_ranks(folder, 4, cases(models, batches, OF_FOUR, ("off", "overlap", "compiled")))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_FOUR)
def test_nor_in_other_layouts(layout: str, four: Path, expected: Any) -> None:
    compare(four, layout, ("off", "overlap", "compiled"), 4, expected(OF_FOUR[layout][0]))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"overlap_param_gather": True, **OFF}, "needs megatron.overlap_grad_reduce = true"),
        ({"overlap_grad_reduce": 1}, "must be true or false"),
        ({"ddp_bucket_size": 0}, "must be a whole number from 1 on"),
        ({"bucket_size": 5}, "follows from megatron.ddp_bucket_size; set that"),
        ({"average_in_collective": True}, "algorithm.loss_aggregation"),
        ({"adam_beta2": 0.95}, "follows from train.adam_beta2"),
        ({"muon_momentum": 0.9}, "has no meaning here: the optimizer is AdamW"),
        ({"data_parallel_sharding_strategy": "optim"}, "train.backend = 'fsdp'"),
        ({"overlap_grad_reduced": True}, "do you mean megatron.overlap_grad_reduce?"),
    ],
)
def test_names_are_checked(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        Settings.of(table, TrainConfig())


def test_what_is_on_unless_it_is_set() -> None:
    plain = Settings.of({}, TrainConfig()).copies
    assert plain.overlap_grad_reduce and plain.overlap_param_gather and plain.grad_reduce_in_fp32
    whole = Settings.of({"use_distributed_optimizer": False}, TrainConfig()).copies
    assert whole.overlap_grad_reduce and not whole.overlap_param_gather
    hooked = TrainConfig(custom_megatron_before_train_step_hook_path="a.b")
    assert not Settings.of({}, hooked).copies.overlap_param_gather
    assert Settings.of({"ddp_bucket_size": 7}, TrainConfig()).copies.bucket_size == 7


@dataclass
class Part:
    master: Any
    reduced: Any
    decays: bool
    computes: Any


def parts() -> list[Part]:
    draw = torch.Generator().manual_seed(1)
    sizes = (70, 5, 130, 90, 20, 64, 200)
    masters = [torch.randn(n, generator=draw) for n in sizes]
    return [
        Part(master, torch.empty(0), k % 2 == 0, master.bfloat16())
        for k, master in enumerate(masters)
    ]


def test_runs_in_the_host_s_memory_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "RUN", 100)
    train = TrainConfig(weight_decay=0.1)
    plain, apart = parts(), parts()
    steps = stepping.Steps(plain, train), stepping.HostSteps(apart, train)
    assert (len(steps[0].runs), len(steps[1].runs)) == (1, 3)
    draw = torch.Generator().manual_seed(2)
    for _ in range(3):
        for one, other in zip(plain, apart, strict=True):
            one.reduced = torch.randn(len(one.master), generator=draw)
            other.reduced = one.reduced.clone()
        for side in steps:
            side.step(1e-2)
    for one, other in zip(plain, apart, strict=True):
        assert torch.equal(one.master, other.master)
        assert torch.equal(one.computes, other.computes)
        assert torch.equal(other.computes, other.master.bfloat16())
