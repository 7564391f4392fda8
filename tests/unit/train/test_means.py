"""Figures of a batch by slime's names: means over trained tokens, and speed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored_batches import Stored

from rlcore.algorithms.flops import ModelShape, forward_flops
from rlcore.config.tree import AlgorithmConfig
from rlcore.sample import Sample, Status

PPO = AlgorithmConfig(advantage_estimator="ppo", kl_coef=0.3, gamma=0.9)
NAMES = "log_probs ref_log_probs rollout_log_probs advantages values returns kl"


def trained(sequences: list[Any], rows: list[list[float]]) -> list[float]:
    """Values of trained tokens, of whole responses' [R]."""
    return [
        x
        for s, xs in zip(sequences, rows, strict=True)
        for x, m in zip(xs, s.loss_mask or [1] * len(xs), strict=True)
        if m
    ]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_means_are_over_the_trained_tokens(toy: Any, make_trainer: Any, num_steps: int) -> None:
    sequences = toy.random_sequences(9)
    trainer = make_trainer(max_tokens_per_gpu=40)
    rows = trainer.log_probs([list(s.tokens) for s in sequences])
    rows = [row[-s.response_length :] for s, row in zip(sequences, rows, strict=True)]
    batch = toy.shares(sequences, 1, num_steps=num_steps, max_tokens=40)[0]
    metrics = trainer.train("start", "a", batch).metrics
    steps = [[s for micro in step.micro_batches for s in micro] for step in batch.steps]
    places = {id(s): k for k, s in enumerate(sequences)}

    def mean(values: list[Any]) -> float:
        parts = [trained(step, [values[places[id(s)]] for s in step]) for step in steps]
        return sum(sum(part) / len(part) for part in parts) / len(parts)

    expected = {
        "log_probs": mean(rows),
        "rollout_log_probs": mean([s.rollout_log_probs for s in sequences]),
        "advantages": mean([[s.advantages] * s.response_length for s in sequences]),
    }
    for name, value in expected.items():
        assert metrics[f"rollout/{name}"] == pytest.approx(value, abs=1e-6)
    assert not {"rollout/values", "rollout/kl", "rollout/ref_log_probs"} & metrics.keys()


def test_two_ranks_have_the_means_of_one(
    toy: Any, make_trainer: Any, two_ranks: Any, model_folder: Path
) -> None:
    sequences = toy.random_sequences(11)
    alone = make_trainer(algorithm=PPO)
    one = alone.train("start", "a", toy.shares(sequences, 1, num_steps=2)[0]).metrics
    cut = toy.shares(sequences, 2, num_steps=2, max_tokens=30)
    two = two_ranks.run(model_folder, [cut], algorithm=PPO)
    for result in two:
        for name in NAMES.split():
            found = result["reports"][0][f"rollout/{name}"]
            assert found == pytest.approx(one[f"rollout/{name}"], abs=1e-5)
    assert two[0]["reports"][0]["rollout/kl"] == 0.0
    for metrics in (one, two[0]["reports"][0]):
        # Each rank did its share in its own time, so the products tell what was counted.
        work = metrics["perf/actor_train_tflops"] * metrics["perf/actor_train_time"]
        metrics["work"] = work
    assert two[0]["reports"][0]["work"] == pytest.approx(one["work"] / 2, rel=1e-9)


def test_speed_is_that_of_the_phases(toy: Any, make_trainer: Any) -> None:
    sequences = toy.random_sequences(7)
    algorithm = AlgorithmConfig(use_kl_loss=True)
    trainer = make_trainer(algorithm=algorithm)
    batch = toy.shares(sequences, 1, num_steps=2)[0]
    metrics = trainer.train("start", "a", batch).metrics
    seconds = metrics["seconds_forward_backward"] + metrics["seconds_optimizer"]
    assert metrics["perf/actor_train_time"] == seconds
    assert metrics["perf/actor_train_tok_per_s"] == pytest.approx(batch.tokens / seconds)
    shape = ModelShape(32, 64, 2, 4, 2, 128, toy.vocab)
    flops = sum(forward_flops(len(s.tokens), shape, s.trainable_tokens) for s in sequences)
    for name, times in (("actor_train", 3), ("log_probs", 1), ("ref_log_probs", 1)):
        took = metrics[f"perf/{name}_time"]
        assert metrics[f"perf/{name}_tflops"] == pytest.approx(times * flops / took / 1e12)
    plain = make_trainer().train("start", "a", toy.shares(sequences, 1)[0]).metrics
    assert "perf/log_probs_time" not in plain and "perf/actor_train_tflops" in plain


def test_figures_of_the_samples_that_are_trained(tmp_path: Path) -> None:
    samples = [
        Sample(
            group_index=i // 3,
            index=i,
            prompt_id="p",
            prompt="x",
            tokens=[2] * (3 + i),
            response="y",
            response_length=1 + i,
            status=Status.TRUNCATED if i == 4 else Status.COMPLETED,
        )
        for i in range(6)
    ]
    samples[0] = replace(samples[0], remove_sample=True)
    batch = Stored(tmp_path, samples).load()
    assert batch.metrics["rollout/rewards"] == pytest.approx((0 + 1 - 1 + 0 + 1) / 5)
    assert batch.metrics["rollout/response_lengths"] == 4.0
    assert batch.metrics["rollout/truncated"] == pytest.approx(1 / 5)


def test_a_model_of_experts_counts_those_that_a_token_passes() -> None:
    config = SimpleNamespace(
        hidden_size=8,
        intermediate_size=100,
        moe_intermediate_size=6,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        num_hidden_layers=4,
        num_attention_heads=2,
        vocab_size=11,
    )
    shape = ModelShape.of(config)
    assert shape.intermediate_size == (100 + 3 * 12) / 4
    assert (shape.head_dim, shape.num_key_value_heads) == (4, 2)
