"""Invariants of `rlcore.algorithms.aggregate`."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.aggregate import Totals, constant_scale, token_weight
from rlcore.errors import DataError

counts = st.lists(st.integers(0, 500), min_size=1, max_size=40)


@given(counts)
@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_weights_of_a_step_add_up_to_one(how, trainable):
    totals = Totals.of(trainable)
    total = math.fsum(n * token_weight(n, totals, how) for n in trainable)
    assert total == pytest.approx(1.0 if any(trainable) else 0.0, abs=1e-12)


@given(counts, st.integers(0, 5))
@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_sequences_without_a_trainable_token_change_nothing(how, trainable, dead):
    alone, mixed = Totals.of(trainable), Totals.of(trainable + [0] * dead)
    for n in trainable:
        assert token_weight(n, alone, how) == token_weight(n, mixed, how)


def test_token_mean_is_the_mean_over_tokens_and_sequence_mean_over_sequence_means():
    losses = [[1.0, 2.0, 3.0], [10.0]]
    totals = Totals.of(map(len, losses))

    def reduced(how):
        return sum(token_weight(len(seq), totals, how) * x for seq in losses for x in seq)

    assert reduced("token_mean") == pytest.approx((1 + 2 + 3 + 10) / 4)
    assert reduced("sequence_mean") == pytest.approx(((1 + 2 + 3) / 3 + 10) / 2)


def test_totals_that_are_not_of_the_step_are_refused():
    with pytest.raises(DataError, match=r"5 trainable tokens .* counts 4"):
        token_weight(5, Totals(tokens=4, sequences=1), "token_mean")
    with pytest.raises(DataError, match="negative"):
        Totals.of([3, -1])


@given(counts, st.integers(1, 1000))
def test_a_constant_divides_each_sequence_s_sum(trainable, divisor):
    totals = Totals.of(trainable)
    weight = constant_scale(totals, divisor) * token_weight(max(trainable), totals, "token_mean")
    sequences = sum(n > 0 for n in trainable)
    assert weight == pytest.approx(1 / (sequences * divisor) if sequences else 0.0)
