"""Invariants of `rlcore.algorithms.off_policy`; its formulas are tested with the losses."""

import math

import pytest
import torch

from rlcore.algorithms.off_policy import (
    ImportanceSampling,
    left_sequences,
    per_sequence,
    sampling_weights,
)

LEVELS = ["token", "sequence", "geometric"]


def weights_of(old, rollout, settings, lengths=None, mask=None):
    old, rollout = torch.tensor(old), torch.tensor(rollout)
    mask = torch.ones(len(old), dtype=torch.bool) if mask is None else torch.tensor(mask)
    shares = torch.full((len(old),), 1 / len(old))
    return sampling_weights(old, rollout, mask, shares, lengths or (len(old),), settings)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bounding", ["clip", "mask"])
def test_equal_log_probs_weigh_exactly_one(level, bounding):
    settings = ImportanceSampling(1.0, 1.0, level, bounding)
    found, metrics = weights_of([-0.3, -7.1, -2.0], [-0.3, -7.1, -2.0], settings)
    assert found.tolist() == [1.0, 1.0, 1.0]
    assert float(metrics.means["tis_clipfrac"]) == 0.0


def test_levels_by_hand():
    old, rollout = [math.log(2.0), math.log(3.0), 0.0], [0.0, 0.0, math.log(4.0)]
    wide = {"low": 0.0, "high": 100.0}
    lengths = (2, 1)
    token, _ = weights_of(old, rollout, ImportanceSampling(**wide), lengths)
    sequence, _ = weights_of(old, rollout, ImportanceSampling(**wide, level="sequence"), lengths)
    mean, _ = weights_of(old, rollout, ImportanceSampling(**wide, level="geometric"), lengths)
    assert token.tolist() == pytest.approx([2.0, 3.0, 0.25])
    assert sequence.tolist() == pytest.approx([6.0, 6.0, 0.25])
    assert mean.tolist() == pytest.approx([6**0.5, 6**0.5, 0.25])


def test_bounds_clip_or_drop():
    old, rollout = [math.log(3.0), math.log(0.2), 0.0], [0.0, 0.0, 0.0]
    clipped, metrics = weights_of(old, rollout, ImportanceSampling(0.5, 2.0))
    dropped, _ = weights_of(old, rollout, ImportanceSampling(0.5, 2.0, bounding="mask"))
    assert clipped.tolist() == [2.0, 0.5, 1.0]
    assert dropped.tolist() == [0.0, 0.0, 1.0]
    assert float(metrics.means["tis"]) == pytest.approx((3.0 + 0.2 + 1.0) / 3)
    assert float(metrics.means["tis_abs"]) == pytest.approx((2.0 + 0.8) / 3)
    assert float(metrics.means["tis_clipfrac"]) == pytest.approx(2 / 3)
    assert float(metrics.maxima["tis_max"]) == pytest.approx(3.0)


@pytest.mark.parametrize("level", LEVELS)
def test_masked_tokens_are_no_part_of_their_sequence(level):
    settings = ImportanceSampling(0.0, 50.0, level)
    with_garbage, _ = weights_of(
        [0.5, math.nan, 0.25], [0.0, math.inf, 0.0], settings, mask=[True, False, True]
    )
    without, _ = weights_of([0.5, 0.25], [0.0, 0.0], settings)
    assert with_garbage[[0, 2]].tolist() == pytest.approx(without.tolist())


@pytest.mark.parametrize("level", LEVELS)
def test_weights_have_no_gradient_and_are_finite(level):
    old = torch.tensor([-1.0, -1e30], requires_grad=True)
    rollout = torch.tensor([-1e30, -1.0])
    mask = torch.ones(2, dtype=torch.bool)
    settings = ImportanceSampling(0.0, 1e9, level)
    found, metrics = sampling_weights(old, rollout, mask, torch.ones(2), (1, 1), settings)
    assert not found.requires_grad
    assert found.isfinite().all()
    assert all(v.isfinite() for v in (*metrics.means.values(), *metrics.maxima.values()))


def test_only_bad_sequences_that_the_policy_has_left_are_left_out():
    log_ratio = torch.tensor([-0.3, -0.1, -0.3, -0.1, 0.5, -0.1])
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    mask = torch.ones(6, dtype=torch.bool)
    left = left_sequences(log_ratio, advantages, mask, (2, 2, 2), delta=0.1)
    assert left.tolist() == [True, True, False, False, False, False]
    none = left_sequences(log_ratio, advantages, mask, (2, 2, 2), delta=0.25)
    assert not none.any()


def test_per_sequence_sums_and_means_with_gradient():
    values = torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True])
    lengths = (0, 3, 1)
    assert per_sequence(values, mask, lengths, mean=False).tolist() == [3.0, 3.0, 3.0, 4.0]
    assert per_sequence(values, mask, lengths, mean=True).tolist() == [1.5, 1.5, 1.5, 4.0]
    assert torch.autograd.gradcheck(lambda v: per_sequence(v, mask, lengths, mean=True), values)
