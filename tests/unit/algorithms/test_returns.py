"""Invariants of `rlcore.algorithms.returns`, and its formulas in plain Python."""

import math
import random

import pytest
import torch

from rlcore.algorithms.returns import gae, largest, moments, penalised, returns, whiten
from rlcore.errors import DataError

LENGTHS = (4, 1, 0, 7)


def make(seed=0, lengths=LENGTHS):
    draw = random.Random(seed)
    rewards = [r for n in lengths for r in [draw.gauss(0, 1)] * n]
    kl = [draw.gauss(0, 0.3) for _ in rewards]
    values = [draw.gauss(0, 1) for _ in rewards]
    return rewards, kl, values


def sequences(*columns, lengths=LENGTHS):
    start = 0
    for n in lengths:
        yield n, *(column[start : start + n] for column in columns)
        start += n


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_returns_are_discounted_sums_of_what_is_to_come(gamma, kl_coef):
    rewards, kl, _ = make()
    want = []
    for n, rs, ks in sequences(rewards, kl):
        own = [-kl_coef * k + (rs[t] if t == n - 1 else 0.0) for t, k in enumerate(ks)]
        want += [sum(gamma ** (u - t) * own[u] for u in range(t, n)) for t in range(n)]
    got = returns(torch.tensor(rewards), torch.tensor(kl).double(), LENGTHS, gamma, kl_coef)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(want, abs=1e-7)
    if not kl_coef:
        bare = returns(torch.tensor(rewards), None, LENGTHS, gamma, kl_coef)
        assert torch.equal(bare, got)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lambd", [1.0, 0.95, 0.0])
def test_gae_is_the_weighted_sum_of_temporal_differences(gamma, lambd):
    rewards, kl, values = make(1)
    want, wanted_returns = [], []
    for n, rs, ks, vs in sequences(rewards, kl, values):
        own = [-0.1 * k + (rs[t] if t == n - 1 else 0.0) for t, k in enumerate(ks)]
        delta = [own[t] + gamma * (vs[t + 1] if t + 1 < n else 0.0) - vs[t] for t in range(n)]
        for t in range(n):
            advantage = sum((gamma * lambd) ** (u - t) * delta[u] for u in range(t, n))
            want.append(advantage)
            wanted_returns.append(advantage + vs[t])
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (rewards, kl, values)]
    got, back = gae(*tensors, LENGTHS, gamma=gamma, lambd=lambd, kl_coef=0.1)
    assert got.tolist() == pytest.approx(want, abs=1e-12)
    assert back.tolist() == pytest.approx(wanted_returns, abs=1e-12)


def test_gae_with_lambda_one_is_the_return_less_the_value():
    rewards, _, values = (torch.tensor(x, dtype=torch.float64) for x in make(2))
    advantages, back = gae(rewards, None, values, LENGTHS, gamma=1.0, lambd=1.0)
    torch.testing.assert_close(back, rewards, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(advantages, rewards - values, rtol=1e-12, atol=1e-12)


def test_the_penalty_of_a_baseline_is_the_tokens_own():
    got = penalised(torch.tensor([1.0, 1.0]), torch.tensor([0.5, -0.25]), 0.2)
    assert got.tolist() == pytest.approx([0.9, 1.05])


def test_no_tokens_have_no_returns():
    none = torch.zeros(0)
    assert returns(none, none, (), 0.9, 0.1).tolist() == []
    assert [x.tolist() for x in gae(none, None, none, (0,), gamma=1.0, lambd=0.9)] == [[], []]


def test_sequences_must_cover_the_tokens():
    with pytest.raises(DataError, match="the sequences have 3 tokens, but 4 are given"):
        returns(torch.ones(4), None, (3,), 1.0, 0.0)


# --- whitening ------------------------------------------------------------------------------------


def whitened(parts):
    """As ranks do it: (values, mask) of each part, one shift, sums added up."""
    shift = max(largest(v, m) for v, m in parts)
    over = moments(*parts[0], shift)
    for part in parts[1:]:
        over = over.add(moments(*part, shift))
    return torch.cat([whiten(v, m, over) for v, m in parts])


def random_part(seed, n=50):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g) * 3 + 5, torch.rand(n, generator=g) < 0.6


def test_whitened_is_the_plain_formula():
    values, mask = random_part(0)
    kept = [v for v, m in zip(values.double().tolist(), mask.tolist(), strict=True) if m]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / (len(kept) - 1)
    got = whitened([(values, mask)])
    assert got[mask].tolist() == pytest.approx(
        [(v - mean) / math.sqrt(variance + 1e-8) for v in kept], abs=1e-12
    )
    assert not got[~mask].any()


def test_the_cut_into_parts_does_not_show():
    parts = [random_part(seed, n) for seed, n in ((1, 30), (2, 1), (3, 0), (4, 17))]
    whole = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    torch.testing.assert_close(whitened(parts), whitened([whole]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("value", [0.1, -3.3, 1e6, 0.0])
@pytest.mark.parametrize("n", [1, 3, 1000])
def test_equal_advantages_become_exactly_zero(value, n):
    values, mask = torch.full((n,), value), torch.ones(n, dtype=torch.bool)
    assert not whitened([(values, mask), (values, mask)]).any()


def test_masked_positions_never_matter():
    values, mask = random_part(5)
    for garbage in (math.nan, math.inf, -math.inf, 1e38):
        dirty = torch.where(mask, values, garbage)
        assert torch.equal(whitened([(dirty, mask)]), whitened([(values, mask)]))


def test_nothing_trained_is_all_zero():
    values, mask = torch.ones(3), torch.zeros(3, dtype=torch.bool)
    assert whitened([(values, mask)]).tolist() == [0.0] * 3
