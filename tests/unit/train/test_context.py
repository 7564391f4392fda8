"""Micro-batches whose tokens are split over ranks: the numbers are those of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import build_config
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import ConfigError
from rlcore.train.fsdp.context import _copies

TOLERANCE = 1e-5
GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
GSPO = AlgorithmConfig(advantage_estimator="gspo", use_kl_loss=True)
OTHERS = {
    "opsm": AlgorithmConfig(use_opsm=True, opsm_delta=1e-4, use_tis=True, tis_level="sequence"),
    "whitened": AlgorithmConfig(
        advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True, kl_coef=0.1
    ),
    "critic": AlgorithmConfig(advantage_estimator="ppo", kl_coef=0.1),
}
NOT_THE_SAME = ("seconds", "per_s", "perf/")
"""In names of figures that depend on the clock."""


def train_config(size: int, **more: Any) -> TrainConfig:
    given = {"lr": 1e-2, "num_iterations": 4, "context_parallel_size": size} | more
    return TrainConfig(**given)


def split(toy: Any, sequences: list[Any], world: int, size: int, **how: Any) -> list[Any]:
    """Each rank's batch, the same for the ranks of a context."""
    dealt = toy.shares(sequences, world // size, **how)
    return [dealt[rank // size] for rank in range(world)]


def check_equal(ours: dict[str, float], alone: dict[str, float]) -> None:
    """All figures but those of the clock."""
    for name in alone:
        if not any(part in name for part in NOT_THE_SAME):
            assert ours[name] == pytest.approx(alone[name], rel=TOLERANCE, abs=TOLERANCE), name


def check_gradient(results: list[Any], metrics: dict[str, float], gradient: list[Any]) -> None:
    """The parts of all ranks, end to end, are the gradient of one."""
    for result in results:
        check_equal(result["measured"][0], metrics)
    for parts in zip(gradient, *(result["measured"][1] for result in results), strict=True):
        assert torch.allclose(torch.cat(parts[1:]), parts[0], atol=TOLERANCE)


@pytest.mark.parametrize("algorithm", [GRPO, GSPO], ids=["grpo", "gspo"])
def test_loss_and_gradient_are_those_of_one_rank(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path, algorithm: AlgorithmConfig
) -> None:
    sequences = toy.random_sequences(13)
    one = make_trainer(algorithm=algorithm)
    metrics, gradient = one.measure(toy.shares(sequences, 1, micro_batches=3)[0], algorithm)
    cut = toy.shares(sequences, 1, num_steps=2, max_tokens=40)
    alone = one.train("start", "next", cut[0]).metrics
    results = two_ranks.run(
        model_folder,
        [split(toy, sequences, 2, 2, num_steps=2, max_tokens=40)],
        measure=split(toy, sequences, 2, 2, micro_batches=3),
        train=train_config(2),
        algorithm=algorithm,
    )
    check_gradient(results, metrics, gradient)
    for result in results:
        check_equal(result["reports"][0], alone)
        got = result["log_probs"][0]
        assert got == pytest.approx(one.log_probs([[1, 2, 3]])[0], abs=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_what_goes_by_sequences_and_batches_is_that_of_one_rank(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path, name: str
) -> None:
    algorithm, sequences = OTHERS[name], toy.random_sequences(9)
    cut = {"num_steps": 2, "max_tokens": 40}
    alone = make_trainer(algorithm=algorithm).train(
        "start", "next", toy.shares(sequences, 1, **cut)[0]
    )
    results = two_ranks.run(
        model_folder,
        [split(toy, sequences, 2, 2, **cut)],
        train=train_config(2, gradient_checkpointing=True),
        algorithm=algorithm,
    )
    for result in results:
        check_equal(result["reports"][0], alone.metrics)


def test_a_run_goes_on_from_its_state_bit_by_bit(
    toy: Any, two_ranks: Any, model_folder: Path, tmp_path: Path
) -> None:
    batches = [split(toy, toy.random_sequences(7, seed), 2, 2) for seed in (1, 2)]
    whole = two_ranks.run(model_folder, batches, train=train_config(2), save=tmp_path / "whole")
    two_ranks.run(model_folder, batches[:1], train=train_config(2), save=tmp_path / "half")
    rest = two_ranks.run(
        model_folder,
        batches[1:],
        train=train_config(2),
        restore=tmp_path / "half",
        save=tmp_path / "rest",
    )
    assert whole[0]["saved"] == whole[1]["saved"] == rest[0]["saved"] == rest[1]["saved"]


def test_one_token_is_shared_too(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path
) -> None:
    """Nothing to train on in one of two micro-batches, and a stretch without a real token."""
    sequences = toy.random_sequences(1)
    alone = make_trainer().train("start", "next", toy.shares(sequences, 1, micro_batches=2)[0])
    for result in two_ranks.run(
        model_folder, [split(toy, sequences, 2, 2, micro_batches=2)], train=train_config(2)
    ):
        check_equal(result["reports"][0], alone.metrics)


def test_experts_count_no_token_that_fills_up(
    toy: Any, make_trainer: Any, two_ranks: Any, tmp_path: Path
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    folder = toy.write_model(tmp_path / "moe", "qwen3_moe", **experts)
    sequences = toy.random_sequences(7)
    odd = (n for n in range(3, 8) if sum(len(s.tokens) - 1 for s in sequences[:n]) % 2)
    sequences = sequences[: next(odd)]
    alone = make_trainer(folder).train("start", "next", toy.shares(sequences, 1)[0]).metrics
    assert "moe/load_mean" in alone
    results = two_ranks.run(folder, [split(toy, sequences, 2, 2)], train=train_config(2))
    for result in results:
        check_equal(result["reports"][0], alone)


def test_what_cannot_be_split_is_said() -> None:
    tree = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
        "cluster": {"actor_num_gpus_per_node": 3},
        "train": {"context_parallel_size": 2},
    }
    with pytest.raises(ConfigError, match=r"context_parallel_size = 2 does not divide .* 3 ranks"):
        build_config(tree)
    with pytest.raises(ConfigError, match=r"does not divide the 9 attention heads of Linear"):
        _copies(torch.nn.Linear(1, 1), 9, 3, 2)
    assert [_copies(torch.nn.Linear(1, 1), 12, 3, size) for size in (1, 2, 3, 4, 12)] == [
        *(1, 2, 1, 4, 4),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", [GRPO, GSPO], ids=["grpo", "gspo"])
def test_four_ranks_in_two_groups_or_one(
    toy: Any,
    make_trainer: Any,
    four_ranks: Any,
    model_folder: Path,
    size: int,
    algorithm: AlgorithmConfig,
) -> None:
    """With four ranks in a group each key and value is repeated: the model has two of a kind."""
    sequences = toy.random_sequences(13)
    metrics, gradient = make_trainer(algorithm=algorithm).measure(
        toy.shares(sequences, 1)[0], algorithm
    )
    results = four_ranks.run(
        model_folder,
        [split(toy, sequences, 4, size, max_tokens=30)],
        measure=split(toy, sequences, 4, size),
        train=train_config(size),
        algorithm=algorithm,
    )
    check_gradient(results, metrics, gradient)
