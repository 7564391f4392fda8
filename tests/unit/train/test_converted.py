"""A function of one's own that makes training sequences of samples, and what it may get wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_batches import Stored

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import PluginError
from rlcore.sample import Sample, Status
from rlcore.train.converted import to_sequences
from rlcore.train.trainer import TrainBatch

SAME = """
def convert(args, samples):
    rewards = [s.get_reward_value(None) for s in samples]
    groups = [s.group_index for s in samples]
    data = {"tokens": [], "response_lengths": [], "rewards": [], "loss_masks": [],
            "rollout_log_probs": [], "raw_reward": rewards, "metadata": None}
    for s, r in zip(samples, rewards):
        own = [x for x, g in zip(rewards, groups) if g == s.group_index]
        data["tokens"].append(s.tokens)
        data["response_lengths"].append(s.response_length)
        data["rewards"].append(r - sum(own) / len(own))
        mask = s.loss_mask or [1] * s.response_length
        data["loss_masks"].append([0] * len(mask) if s.remove_sample else mask)
        data["rollout_log_probs"].append(s.rollout_log_probs)
    return data

def halves(args, samples):
    s = samples[0]
    return {"tokens": [s.tokens[:-1], s.tokens], "response_lengths": [s.response_length - 1] * 2,
            "rewards": [0.5, -0.5], "rollout_log_probs": [None, [-1.0] * (s.response_length - 1)]}

def nothing(args, samples):
    return {"tokens": [], "response_lengths": [], "rewards": []}
"""


def make_samples() -> list[Sample]:
    return [
        Sample(
            group_index=i // 3,
            index=i,
            prompt_id=f"p{i // 3}",
            prompt="x",
            tokens=[i + 2] * (3 + 2 + i % 3),
            response="y",
            response_length=2 + i % 3,
            loss_mask=[0, 1, 1, 0] if i == 5 else None,
            rollout_log_probs=[-1.0 - i] * (2 + i % 3),
            status=Status.COMPLETED,
        )
        for i in range(12)
    ]


def loaded(folder: Path, stored: Stored, name: str, **more: Any) -> TrainBatch:
    (folder / "own.py").write_text(SAME)
    spec = f"{folder}/own.py:{name}"
    own = AlgorithmConfig(custom_convert_samples_to_train_data_path=spec)
    return stored.load(algorithm=own, **more)


def told(batch: TrainBatch) -> list[Any]:
    """All of a batch's sequences as plain values."""
    return [
        (
            step.totals,
            list(s.tokens),
            s.response_length,
            float(s.advantages),  # type: ignore[arg-type]
            s.trainable_tokens,
            None if s.rollout_log_probs is None else list(s.rollout_log_probs),
        )
        for step in batch.steps
        for micro in step.micro_batches
        for s in micro
    ]


def test_a_function_that_says_the_same_makes_the_same_batch(tmp_path: Path) -> None:
    samples = make_samples()
    samples[4] = replace(samples[4], remove_sample=True)
    rewards: list[float | None] = [float(i % 3) for i in range(12)]
    rewards[7] = None
    keep = [i > 2 for i in range(12)]
    stored = Stored(tmp_path / "store", samples, rewards=rewards, keep=keep)
    for rank in (0, 1):
        plain = stored.load(rank, 2, num_steps_per_rollout=2, max_tokens_per_gpu=12)
        own = loaded(
            tmp_path,
            stored,
            "convert",
            rank=rank,
            world=2,
            num_steps_per_rollout=2,
            max_tokens_per_gpu=12,
        )
        assert told(own) == told(plain)
        assert (own.samples, own.tokens) == (plain.samples, plain.tokens)
        assert own.rollout_log_probs
        for name in ("samples_not_kept", "samples_failed", "rollout/rewards"):
            assert own.metrics[name] == pytest.approx(plain.metrics[name])
    assert own.metrics["samples_without_tokens"] == plain.metrics["samples_removed"] == 1


def test_there_may_be_other_sequences_than_samples(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "store", make_samples())
    batch = loaded(tmp_path, stored, "halves")
    assert [row[1:4] for row in told(batch)] == [([2] * 4, 1, 0.5), ([2] * 5, 1, -0.5)]
    assert not batch.rollout_log_probs, "a row without them takes them from all"
    empty = loaded(tmp_path, stored, "nothing")
    assert (empty.steps, empty.samples) == ((), 0)


GOOD = {
    "tokens": [[1, 2, 3], np.array([4, 5])],
    "response_lengths": [2, 1],
    "rewards": [1, np.float32(0.5)],
    "loss_masks": [None, [1]],
    "rollout_log_probs": [[-1.0, -2.0], [-0.5]],
}


def test_rows_of_several_kinds_are_taken() -> None:
    import torch

    first, second = to_sequences(GOOD | {"tokens": [torch.tensor([1, 2, 3]), (4, 5)]}, "f")
    assert list(first.tokens) == [1, 2, 3] and first.loss_mask is None
    assert second.advantages == 0.5 and list(second.loss_mask) == [1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reward": [1, 2]}, r"the key 'reward', .* did you mean 'rewards'\?"),
        ({"rewards": None}, "must return the keys .* 'rewards' lacks"),
        ({"rewards": [1]}, "'rewards' has 1 rows, 'tokens' 2"),
        ({"rewards": [1, float("nan")]}, "row 1 of 'rewards' must be a finite number"),
        ({"tokens": [[1, 2, 3], [4]]}, "row 1 of 'tokens' must be two or more token ids"),
        ({"tokens": [[1, -2, 3], [4, 5]]}, "row 0 of 'tokens'"),
        ({"tokens": [[1, 2, 0.5], [4, 5]]}, "row 0 of 'tokens'"),
        ({"tokens": ["abc", [4, 5]]}, "row 0 of 'tokens'"),
        ({"response_lengths": [3, 1]}, "row 0 of 'response_lengths' must be a number from 0 to 2"),
        ({"loss_masks": [[1, 1, 1], [1]]}, "row 0 of 'loss_masks' must be 2 finite numbers"),
        ({"rollout_log_probs": [[-1, -2], [float("nan")]]}, "row 1 of 'rollout_log_probs'"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=f"^f.*{said}"):
        to_sequences(GOOD | wrong, "f")


def test_only_a_dict_is_taken_and_one_function_makes_the_numbers() -> None:
    with pytest.raises(PluginError, match="f must return a dict of lists, not a list"):
        to_sequences([], "f")
    with pytest.raises(ValueError, match="use one of them"):
        AlgorithmConfig(
            custom_convert_samples_to_train_data_path="m.f", custom_reward_post_process_path="m.g"
        )
