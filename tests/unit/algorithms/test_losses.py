"""Invariants of `rlcore.algorithms.losses`, and the loss against the papers in float64."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.losses import (
    LossInputs,
    PolicyLossSettings,
    log_prob_gap,
    policy_loss,
)
from rlcore.algorithms.metrics import merge_metrics
from rlcore.errors import ConfigError, DataError

SETTINGS = PolicyLossSettings(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_kind="k3")


def make_inputs(n=64, seed=0, dtype=torch.float64, spread=0.4):
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(n, generator=g, dtype=torch.float64).to(dtype)

    new = -1.0 - normal().abs()
    mask = torch.rand(n, generator=g) < 0.7
    return LossInputs(
        log_probs=new.clone().requires_grad_(),
        old_log_probs=new + spread * normal(),
        ref_log_probs=new + spread * normal(),
        advantages=normal(),
        entropy=normal().abs(),
        mask=mask,
        weights=torch.where(mask, torch.rand(n, generator=g), 0.0).to(dtype),
    )


def reference_loss(inputs, settings):
    """PPO eq. 7 with DAPO's two bounds, GRPO's KL term: one token at a time, minimum of gains."""
    total = 0.0
    for t in range(len(inputs.log_probs)):
        if not inputs.mask[t]:
            continue
        new, old, ref, a, w = (
            float(x[t].detach())
            for x in (
                inputs.log_probs,
                inputs.old_log_probs,
                inputs.ref_log_probs,
                inputs.advantages,
                inputs.weights,
            )
        )
        rho = math.exp(new - old)
        bounded = min(max(rho, 1 - settings.clip_low), 1 + settings.clip_high)
        gain = min(rho * a, bounded * a)
        kl = math.exp(ref - new) - (ref - new) - 1
        total += w * (-gain + settings.kl_coef * kl)
    return total


def all_numbers(outputs):
    return {k: float(v) for k, v in (outputs.metrics.means | outputs.metrics.maxima).items()}


def cut(inputs, start, stop):
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return LossInputs(
        **{k: v[start:stop] if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
    )


@pytest.mark.parametrize("seed", range(5))
def test_loss_matches_the_papers_formula(seed):
    inputs = make_inputs(seed=seed)
    out = policy_loss(inputs, SETTINGS)
    assert out.loss.item() == pytest.approx(reference_loss(inputs, SETTINGS), rel=1e-12)
    assert out.metrics.means["loss"].item() == out.loss.item()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_gradient_matches_a_numeric_one(kind):
    inputs = make_inputs(n=24)
    settings = replace(SETTINGS, kl_kind=kind)

    def loss(log_probs):
        return policy_loss(replace(inputs, log_probs=log_probs), settings).loss

    assert torch.autograd.gradcheck(loss, (inputs.log_probs,))


def test_first_step_gradient_is_the_policy_gradient():
    inputs = replace(make_inputs(), old_log_probs=None, ref_log_probs=None)
    policy_loss(inputs, replace(SETTINGS, kl_coef=0.0)).loss.backward()
    want = torch.where(inputs.mask, -inputs.advantages * inputs.weights, 0.0)
    torch.testing.assert_close(inputs.log_probs.grad, want)


def test_no_old_log_probs_means_the_policy_itself():
    inputs = make_inputs()
    given_equal = policy_loss(replace(inputs, old_log_probs=inputs.log_probs.detach()), SETTINGS)
    not_given = policy_loss(replace(inputs, old_log_probs=None), SETTINGS)
    assert all_numbers(given_equal) == all_numbers(not_given)
    assert float(not_given.metrics.maxima["ratio_max"]) == 1.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_stands_at_masked_positions_never_matters(garbage, dtype):
    clean = make_inputs(dtype=dtype)
    want = policy_loss(clean, SETTINGS)
    want.loss.backward()
    names = ["log_probs", "old_log_probs", "ref_log_probs", "advantages", "entropy", "weights"]
    for chosen in [*([n] for n in names), names]:
        dirty = {n: torch.where(clean.mask, getattr(clean, n).detach(), garbage) for n in chosen}
        base = replace(clean, log_probs=clean.log_probs.detach().clone())
        inputs = replace(base, **dirty)
        inputs.log_probs.requires_grad_()
        out = policy_loss(inputs, SETTINGS)
        out.loss.backward()
        assert all_numbers(out) == all_numbers(want)
        assert torch.equal(inputs.log_probs.grad, clean.log_probs.grad)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("gap", [50.0, -50.0, 1e4, -1e4, 1e30, -1e30, math.inf])
def test_extreme_log_ratios_give_finite_losses_and_gradients(gap, advantage, kind):
    new = torch.tensor([-1.0, -abs(gap)] if gap < 0 else [-1.0, -1.0], requires_grad=True)
    other = torch.tensor([-1.0, -1.0 if gap < 0 else -gap])
    inputs = LossInputs(
        log_probs=new,
        old_log_probs=other,
        ref_log_probs=other,
        advantages=torch.full((2,), advantage),
        mask=torch.ones(2, dtype=torch.bool),
        weights=torch.full((2,), 0.5),
    )
    out = policy_loss(inputs, replace(SETTINGS, kl_kind=kind))
    out.loss.backward()
    assert out.loss.isfinite()
    assert new.grad.isfinite().all()
    assert all(map(math.isfinite, all_numbers(out).values()))


def test_nan_at_a_trained_position_is_not_hidden():
    inputs = make_inputs()
    old = inputs.old_log_probs.clone()
    old[inputs.mask.nonzero()[0]] = math.nan
    assert policy_loss(replace(inputs, old_log_probs=old), SETTINGS).loss.isnan()


@given(
    st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4),
    st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4),
)
def test_the_loss_is_never_below_the_unclipped_one(log_ratios, advantages):
    x, a = torch.tensor(log_ratios, dtype=torch.float64), torch.tensor(advantages).double()
    inputs = LossInputs(x, a, torch.ones(4, dtype=torch.bool), torch.ones(4).double() / 4, x * 0)
    out = policy_loss(inputs, PolicyLossSettings(clip_low=0.1, clip_high=0.3))
    assert out.loss.item() >= float((-x.exp() * a).mean()) - 1e-12


def test_clip_fractions_count_the_tokens_that_the_clip_stops():
    ratios = [0.5, 0.5, 1.0, 1.5, 1.5, 1.27, 0.81]
    signs = [1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
    new = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    n = len(ratios)
    inputs = LossInputs(
        log_probs=new,
        old_log_probs=torch.zeros(n, dtype=torch.float64),
        advantages=torch.tensor(signs, dtype=torch.float64),
        mask=torch.ones(n, dtype=torch.bool),
        weights=torch.full((n,), 1 / n, dtype=torch.float64),
    )
    out = policy_loss(inputs, replace(SETTINGS, kl_coef=0.0))
    out.loss.backward()
    assert (new.grad == 0).tolist() == [False, True, False, True, False, False, False]
    means = out.metrics.means
    assert float(means["pg_clipfrac_low"]) == pytest.approx(1 / n)
    assert float(means["pg_clipfrac_high"]) == pytest.approx(1 / n)
    assert float(means["pg_clipfrac"]) == pytest.approx(2 / n)
    assert float(means["ois"]) == pytest.approx(sum(ratios) / n)
    assert float(means["ppo_kl"]) == pytest.approx(-sum(map(math.log, ratios)) / n)
    k3 = sum(r - 1 - math.log(r) for r in ratios) / n
    assert float(means["approx_kl"]) == pytest.approx(k3)
    assert float(out.metrics.maxima["ratio_max"]) == pytest.approx(1.5)
    assert float(out.metrics.maxima["log_ratio_abs_max"]) == pytest.approx(math.log(2))


def test_a_coefficient_of_zero_measures_the_kl_and_leaves_the_loss():
    inputs = make_inputs()
    measured = policy_loss(inputs, replace(SETTINGS, kl_coef=0.0))
    without = policy_loss(replace(inputs, ref_log_probs=None), replace(SETTINGS, kl_coef=0.0))
    assert measured.loss.item() == without.loss.item()
    assert float(measured.metrics.means["kl_loss"]) > 0
    assert "kl_loss" not in without.metrics.means


@pytest.mark.parametrize("n", [0, 5])
def test_a_micro_batch_without_trained_tokens_has_a_loss_and_zero_gradients(n):
    full = make_inputs(n=5)
    inputs = replace(cut(full, 0, n), mask=torch.zeros(n, dtype=torch.bool))
    inputs = replace(inputs, log_probs=inputs.log_probs.detach())
    inputs.log_probs.requires_grad_()
    out = policy_loss(inputs, SETTINGS)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert inputs.log_probs.grad.tolist() == [0.0] * n
    assert set(all_numbers(out).values()) == {0.0}
    assert all_numbers(out).keys() == all_numbers(policy_loss(full, SETTINGS)).keys()


@given(st.lists(st.integers(0, 64), max_size=4))
def test_the_losses_and_metrics_of_any_cut_add_up(cuts):
    inputs = make_inputs()
    whole = policy_loss(inputs, SETTINGS)
    edges = [0, *sorted(cuts), 64]
    parts = [policy_loss(cut(inputs, a, b), SETTINGS) for a, b in pairwise(edges)]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss, rtol=1e-12, atol=1e-14)
    merged = merge_metrics([p.metrics for p in parts])
    for got, want in ((merged.means, whole.metrics.means), (merged.maxima, whole.metrics.maxima)):
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-14)


def test_metrics_carry_no_graph():
    metrics = policy_loss(make_inputs(), SETTINGS).metrics
    assert not any(v.requires_grad for d in (metrics.means, metrics.maxima) for v in d.values())


def test_log_prob_gap_measures_trained_tokens_alone():
    mask = torch.tensor([True, True, False])
    weights = torch.tensor([0.5, 0.5, 9.0])
    train = torch.tensor([-1.0, -2.0, math.nan])
    rollout = torch.tensor([-1.5, -2.25, -1.0])
    gap = log_prob_gap(train, rollout, mask, weights)
    assert float(gap.means["train_rollout_logprob_abs_diff"]) == pytest.approx(0.375)
    assert float(gap.maxima["train_rollout_logprob_abs_diff_max"]) == pytest.approx(0.5)
    k3 = sum(math.exp(d) - 1 - d for d in (0.5, 0.25)) / 2
    assert float(gap.means["train_rollout_kl"]) == pytest.approx(k3, rel=1e-5)


def test_wrong_inputs_are_named():
    inputs = make_inputs()
    with pytest.raises(DataError, match=r"advantages has shape \(3,\) but log_probs has \(64,\)"):
        policy_loss(replace(inputs, advantages=torch.zeros(3)), SETTINGS)
    with pytest.raises(DataError, match=r"must be torch\.bool"):
        policy_loss(replace(inputs, mask=inputs.mask.float()), SETTINGS)
    with pytest.raises(ConfigError, match="use_kl_loss"):
        policy_loss(replace(inputs, ref_log_probs=None), SETTINGS)
