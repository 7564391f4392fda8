"""Invariants of `rlcore.algorithms.advantages`, and the formula against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.advantages import AdvantageInputs, sample_advantages
from rlcore.errors import DataError

REWARDS = st.floats(-100, 100, allow_nan=False, width=32)
MISSING = st.sampled_from([None, float("nan"), float("inf"), float("-inf")])
BATCH = st.lists(st.tuples(st.integers(0, 4), REWARDS | MISSING), min_size=1, max_size=40)


def advantages_of(batch, std_normalization=True):
    groups, rewards = zip(*batch, strict=True)
    return sample_advantages(AdvantageInputs(rewards, groups, std_normalization))


@pytest.mark.parametrize("std_normalization", [True, False])
@pytest.mark.parametrize("shape", [(4, 8), (1, 2), (16, 3)])
def test_equal_groups_match_the_plain_formula(shape, std_normalization):
    r = np.random.default_rng(0).normal(size=shape)
    want = r - r.mean(1, keepdims=True)
    if std_normalization:
        want = want / (r.std(1, ddof=1, keepdims=True) + 1e-6)
    ids = np.repeat(np.arange(shape[0]), shape[1]).tolist()
    out = sample_advantages(AdvantageInputs(r.ravel().tolist(), ids, std_normalization))
    np.testing.assert_allclose(out.advantages, want.ravel(), rtol=1e-12, atol=1e-14)
    assert out.trainable == (True,) * r.size
    assert (out.num_groups, out.num_equal_groups, out.num_failed) == (shape[0], 0, 0)


def test_unequal_groups_that_are_not_adjacent():
    rewards = [1.0, 5.0, 3.0, 0.0, 1.0]
    out = sample_advantages(AdvantageInputs(rewards, ["a", "b", "a", "b", "b"], False))
    assert out.advantages == pytest.approx([-1.0, 3.0, 1.0, -2.0, -1.0])


@given(st.floats(-1e6, 1e6), st.integers(1, 33), st.booleans())
def test_a_group_of_equal_rewards_is_exactly_zero(reward, size, std_normalization):
    out = sample_advantages(AdvantageInputs([reward] * size, [0] * size, std_normalization))
    assert np.asarray(out.advantages, dtype=np.float32).tolist() == [0.0] * size
    assert out.num_equal_groups == 1


def test_equal_rewards_whose_mean_is_not_their_value():
    assert sum([0.1] * 3) / 3 != 0.1
    assert sample_advantages(AdvantageInputs([0.1] * 3, [7] * 3)).advantages == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("std_normalization", [True, False])
def test_a_group_with_one_reward_is_zero(std_normalization):
    out = sample_advantages(AdvantageInputs([3.0, None, 2.0], [0, 0, 1], std_normalization))
    assert out.advantages == (0.0, 0.0, 0.0)
    assert out.trainable == (True, False, True)
    assert out.num_equal_groups == 2


@given(BATCH, st.booleans())
def test_samples_without_reward_change_no_other_sample(batch, std_normalization):
    out = advantages_of(batch, std_normalization)
    kept = [(g, r) for g, r in batch if r is not None and np.isfinite(r)]
    assert out.num_failed == len(batch) - len(kept)
    alone = iter(advantages_of(kept, std_normalization).advantages if kept else ())
    for (_, r), advantage, trainable in zip(batch, out.advantages, out.trainable, strict=True):
        assert trainable == (r is not None and bool(np.isfinite(r)))
        assert advantage == (next(alone) if trainable else 0.0)


@given(BATCH, st.randoms())
def test_the_order_of_the_samples_does_not_show(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    straight = advantages_of(batch)
    shuffled = advantages_of([batch[i] for i in order])
    assert shuffled.advantages == tuple(straight.advantages[i] for i in order)


@given(BATCH)
def test_the_advantages_of_a_group_add_up_to_zero_and_have_unit_spread(batch):
    out = advantages_of(batch)
    for group in {g for g, _ in batch}:
        chosen = [
            a
            for (g, _), a, t in zip(batch, out.advantages, out.trainable, strict=True)
            if g == group and t
        ]
        assert sum(chosen) == pytest.approx(0.0, abs=1e-6)
        if len(chosen) > 1 and any(chosen):
            assert np.std(chosen, ddof=1) <= 1.0 + 1e-9


def test_without_a_baseline_the_reward_is_the_advantage():
    rewards = [0.1, None, 0.1, -2.5]
    out = sample_advantages(AdvantageInputs(rewards, [0, 0, 0, 1], True, baseline=False))
    assert out.advantages == (0.1, 0.0, 0.1, -2.5)
    assert out.trainable == (True, False, True, True)
    assert (out.num_groups, out.num_equal_groups) == (2, 2)


def test_a_group_id_for_each_reward():
    with pytest.raises(DataError, match="2 rewards but 1 group ids"):
        sample_advantages(AdvantageInputs([1.0, 2.0], [0]))


@given(
    st.lists(st.tuples(st.integers(0, 3), REWARDS, st.integers(1, 4)), min_size=1, max_size=20),
    st.booleans(),
)
def test_an_execution_weighs_the_same_however_many_samples_were_cut_from_it(batch, std):
    groups, rewards, sizes = zip(*batch, strict=True)
    alone = sample_advantages(AdvantageInputs(rewards, groups, std))
    each = [k for k, size in enumerate(sizes) for _ in range(size)]
    out = sample_advantages(
        AdvantageInputs([rewards[k] for k in each], [groups[k] for k in each], std, executions=each)
    )
    wanted = [alone.advantages[k] for k in each]
    np.testing.assert_allclose(out.advantages, wanted, rtol=1e-9, atol=1e-9)
    assert out.num_equal_groups == alone.num_equal_groups
    by_itself = range(len(rewards))
    same = sample_advantages(AdvantageInputs(rewards, groups, std, executions=by_itself))
    assert same == alone


def test_a_sample_s_own_reward_is_compared_with_those_of_executions():
    rewards, executions = [1.0, 0.0, 3.0, None], ["a", "a", "b", "b"]
    out = sample_advantages(AdvantageInputs(rewards, [0] * 4, False, executions=executions))
    # Executions have 0.5 and 3: the mean is 1.75.
    assert out.advantages == (-0.75, -1.75, 1.25, 0.0)
    squares = (0.75**2 + 1.75**2) / 2 + 1.25**2
    scaled = sample_advantages(AdvantageInputs(rewards, [0] * 4, executions=executions))
    assert scaled.advantages[2] == pytest.approx(1.25 / (squares**0.5 + 1e-6), rel=1e-12)
    one = sample_advantages(AdvantageInputs([1.0, 0.0], [0, 0], executions=["a", "a"]))
    assert (one.advantages, one.num_equal_groups) == ((0.0, 0.0), 1)
    with pytest.raises(DataError, match="2 rewards but 1 execution ids"):
        sample_advantages(AdvantageInputs([1.0, 2.0], [0, 0], executions=[0]))
