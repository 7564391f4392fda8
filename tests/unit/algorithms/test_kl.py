"""Invariants of `rlcore.algorithms.kl`, and the estimators against exact divergences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.kl import kl_estimate

KINDS = ["k1", "k2", "k3", "low_var_kl"]


def reference(x, kind):
    """Schulman's formulas in float64, one number at a time."""
    k3 = math.exp(-x) - 1 + x
    return {"k1": x, "k2": x * x / 2, "k3": k3, "low_var_kl": max(-10.0, min(10.0, k3))}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_estimators_match_the_formulas(kind):
    x = torch.linspace(-19, 19, 77, dtype=torch.float64)
    want = torch.tensor([reference(v, kind) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(kl_estimate(x, kind), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_numeric_ones(kind):
    x = torch.tensor([-3.7, -1.0, -0.2, 0.3, 1.5, 4.0, 12.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: kl_estimate(v, kind), x.requires_grad_())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_estimators_average_to_the_divergence(kind):
    torch.manual_seed(0)
    pi, ref = torch.randn(2, 9, dtype=torch.float64).log_softmax(-1)
    exact = (pi.exp() * (pi - ref)).sum()
    torch.testing.assert_close((pi.exp() * kl_estimate(pi - ref, kind)).sum(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_every_estimator_is_exactly_zero_for_equal_policies(kind):
    assert kl_estimate(torch.zeros(3), kind).tolist() == [0.0] * 3


@given(st.lists(st.floats(-1, 1, width=32) | st.floats(-1e4, 1e4, width=32), min_size=1))
@pytest.mark.parametrize("kind", ["k2", "k3", "low_var_kl"])
def test_never_negative_in_float32(kind, values):
    assert (kl_estimate(torch.tensor(values), kind) >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_log_ratios_give_finite_values_and_gradients(kind):
    x = torch.tensor([-math.inf, -1e30, -200.0, 200.0, 1e30, math.inf], requires_grad=True)
    kl = kl_estimate(x, kind)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert x.grad.tolist() == [0.0] * 6


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_times_the_ratio_they_average_to_the_divergence_under_another_policy(kind):
    torch.manual_seed(1)
    pi, ref, old = torch.randn(3, 9, dtype=torch.float64).log_softmax(-1)
    exact = (pi.exp() * (pi - ref)).sum()
    estimates = kl_estimate(pi - ref, kind, (pi - old).exp())
    torch.testing.assert_close((old.exp() * estimates).sum(), exact)


def test_low_var_kl_is_clamped_after_the_ratio():
    x, ratio = torch.tensor([-2.0]), torch.tensor([100.0])
    assert kl_estimate(x, "low_var_kl", ratio).tolist() == [10.0]
