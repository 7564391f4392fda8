"""From Parquet parts to each rank's share."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored_batches import Stored

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import DataError, PluginError
from rlcore.sample import Sample, Status
from rlcore.store.objects import Objects
from rlcore.train.trainer import TrainBatch


def make_samples() -> list[Sample]:
    """Four groups of three, of different lengths."""
    samples = []
    for i in range(12):
        response = 2 + i % 3
        samples.append(
            Sample(
                group_index=i // 3,
                index=i,
                prompt_id=f"p{i // 3}",
                prompt="x",
                tokens=[i + 2] * (3 + response),
                response="y",
                response_length=response,
                rollout_log_probs=[-1.0] * response,
                status=Status.COMPLETED,
            )
        )
    return samples


def first_tokens(batch: TrainBatch) -> list[int]:
    return [int(s.tokens[0]) for step in batch.steps for m in step.micro_batches for s in m]


def test_every_sample_is_on_one_rank_with_its_advantage(tmp_path: Path) -> None:
    stored = Stored(tmp_path, make_samples())
    shares = [
        stored.load(rank, 2, num_steps_per_rollout=2, max_tokens_per_gpu=12) for rank in (0, 1)
    ]
    assert sorted(first_tokens(shares[0]) + first_tokens(shares[1])) == list(range(2, 14))
    for a, b in zip(shares[0].steps, shares[1].steps, strict=True):
        assert a.totals == b.totals
        assert len(a.micro_batches) == len(b.micro_batches)
    assert [step.totals.sequences for step in shares[0].steps] == [6, 6]
    assert [step.totals.tokens for step in shares[0].steps] == [18, 18]
    whole = stored.load()
    assert (whole.iteration, whole.samples, whole.tokens) == (7, 12, 12 * 6)
    for sequence in whole.steps[0].micro_batches[0]:
        i = int(sequence.tokens[0]) - 2
        assert sequence.advantages == float(i % 3) - 1.0
        assert np.array_equal(sequence.rollout_log_probs, np.full(2 + i % 3, -1.0, np.float32))  # type: ignore[arg-type]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    samples = make_samples()
    samples[3] = replace(samples[3], remove_sample=True)
    samples[4] = replace(samples[4], loss_mask=[0, 0, 0])
    samples[5] = replace(samples[5], loss_mask=[1, 0, 0, 1])
    samples[7] = replace(samples[7], status=Status.FAILED)
    rewards: list[float | None] = [float(i % 3) for i in range(12)]
    rewards[6] = None
    stored = Stored(
        tmp_path,
        samples,
        rewards=rewards,
        keep=[False] * 3 + [True] * 9,
        status=["completed"] * 8 + ["failed"] + ["completed"] * 3,
    )
    batch = stored.load()
    assert sorted(first_tokens(batch)) == [5 + 2, 9 + 2, 10 + 2, 11 + 2]
    reasons = ("not_kept", "failed", "removed", "without_tokens")
    assert [batch.metrics[f"samples_{r}"] for r in reasons] == [3, 3, 1, 1]
    assert batch.samples == 4
    assert batch.steps[0].totals.tokens == 2 + 2 + 3 + 4
    by_token = {int(s.tokens[0]): s for s in batch.steps[0].micro_batches[0]}
    assert by_token[7].advantages == 1.0, "removed and masked samples count in the group's mean"


def test_a_failed_sample_is_no_zero_reward(tmp_path: Path) -> None:
    stored = Stored(
        tmp_path,
        make_samples(),
        rewards=[0.0, 1.0, 0.0] + [1.0] * 9,
        status=["failed"] + ["completed"] * 11,
    )
    by_token = {int(s.tokens[0]): s for s in stored.load().steps[0].micro_batches[0]}
    assert 2 not in by_token
    assert [by_token[t].advantages for t in (3, 4)] == [0.5, -0.5]


def test_a_filtered_batch_is_cut_evenly(tmp_path: Path) -> None:
    stored = Stored(tmp_path, make_samples(), keep=[True] * 9 + [False] * 3)
    batch = stored.load(num_steps_per_rollout=2)
    assert [step.totals.sequences for step in batch.steps] == [4, 5]
    one = Stored(tmp_path / "one", make_samples(), keep=[True] + [False] * 11)
    assert [step.totals.sequences for step in one.load(num_steps_per_rollout=2).steps] == [1]


def test_samples_cut_from_one_execution_count_as_one(tmp_path: Path) -> None:
    samples = make_samples()
    # In each group the first two are of one execution; rewards are 0, 1, 2.
    for i, sample in enumerate(samples):
        sample.rollout_id = i - i % 3 if i % 3 < 2 else None
    batch = Stored(tmp_path, samples).load(num_steps_per_rollout=2, max_tokens_per_gpu=1000)
    assert [step.totals.sequences for step in batch.steps] == [4, 4]
    assert [step.totals.tokens for step in batch.steps] == [18, 18]
    assert batch.samples == 12
    for step in batch.steps:
        for sequence in step.micro_batches[0]:
            i = int(sequence.tokens[0]) - 2
            assert sequence.execution_tokens == (5 if i % 3 < 2 else 4)
            assert sequence.advantages == (i % 3) - 1.25
    removed = [replace(s, remove_sample=i % 3 == 0) for i, s in enumerate(samples)]
    [step] = Stored(tmp_path / "removed", removed).load().steps
    assert {s.execution_tokens for s in step.micro_batches[0]} == {3, 4}
    assert (step.totals.sequences, step.totals.tokens) == (8, 28)


def test_a_batch_of_which_nothing_is_kept_has_no_step(tmp_path: Path) -> None:
    none = Stored(tmp_path, make_samples(), keep=[False] * 12).load()
    assert (none.steps, none.samples) == ((), 0)


def test_parts_of_different_batches_are_refused(tmp_path: Path) -> None:
    stored = Stored(tmp_path, make_samples())
    other = Stored(tmp_path / "other", make_samples()[:6])
    stored.objects = other.objects
    stored.files = replace(other.files, reward=stored.files.reward)
    Objects.open(tmp_path / "other").put(
        "reward.parquet", (tmp_path / "reward.parquet").read_bytes()
    )
    with pytest.raises(DataError, match="iteration 7: the reward part has 12 rows"):
        stored.load()


def test_log_probs_of_the_engine_are_all_or_none(tmp_path: Path) -> None:
    samples = make_samples()
    assert Stored(tmp_path / "all", samples).load().rollout_log_probs
    samples[3] = replace(samples[3], rollout_log_probs=None)
    some = Stored(tmp_path / "some", samples).load()
    assert not some.rollout_log_probs
    assert all(s.rollout_log_probs is None for s in some.steps[0].micro_batches[0])
    dropped = Stored(tmp_path / "dropped", samples, keep=[True] * 3 + [False] * 3 + [True] * 6)
    assert dropped.load().rollout_log_probs, "a sample that is not trained needs none"


def test_what_a_teacher_says_comes_along_where_all_samples_have_it(tmp_path: Path) -> None:
    samples = [replace(s, teacher_log_probs=[-2.0] * s.response_length) for s in make_samples()]
    told = Stored(tmp_path / "all", samples).load()
    assert told.teacher_log_probs
    for sequence in told.steps[0].micro_batches[0]:
        expected = np.full(sequence.response_length, -2.0, np.float32)
        assert np.array_equal(sequence.teacher_log_probs, expected)  # type: ignore[arg-type]
    samples[4] = replace(samples[4], teacher_log_probs=None)
    some = Stored(tmp_path / "some", samples).load()
    assert not some.teacher_log_probs
    assert some.steps[0].micro_batches[0][0].teacher_log_probs is None


def test_a_function_makes_advantages_of_the_rewards_of_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def ranks(args, samples):\n"
        "    assert all(s.prompt_id and s.tokens for s in samples)\n"
        "    raw = [s.get_reward_value(None) for s in samples]\n"
        "    return raw, [s.index + 100 * r for s, r in zip(samples, raw)]\n"
        "def short(args, samples):\n"
        "    return [0.0], [0.0]\n"
        "def nothing(args, samples):\n"
        "    return [0.0] * len(samples), [float('nan')] * len(samples)\n"
    )
    samples = make_samples()
    samples[4] = replace(samples[4], remove_sample=True)
    rewards: list[float | None] = [float(i % 3) for i in range(12)]
    rewards[7] = None
    keep = [i != 2 for i in range(12)]
    stored = Stored(tmp_path / "store", samples, rewards=rewards, keep=keep)

    def load(name: str) -> TrainBatch:
        spec = f"{tmp_path}/mine.py:{name}"
        return stored.load(algorithm=AlgorithmConfig(custom_reward_post_process_path=spec))

    found = {
        int(s.tokens[0]) - 2: s.advantages
        for step in load("ranks").steps
        for micro in step.micro_batches
        for s in micro
    }
    assert found == {i: i + 100 * (i % 3) for i in range(12) if i not in (2, 4, 7)}
    with pytest.raises(PluginError, match=r"post_process_path = .* returned 1 numbers; .* 10 rew"):
        load("short")
    with pytest.raises(PluginError, match="returned nan for sample 0"):
        load("nothing")
