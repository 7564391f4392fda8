"""Every loss against its paper, token by token in plain Python, and against numeric gradients."""

import math
from dataclasses import fields, replace
from itertools import product

import pytest
import torch

from rlcore.algorithms.losses import (
    LossInputs,
    PolicyLossSettings,
    effective_share,
    policy_loss,
)
from rlcore.algorithms.metrics import merge_metrics
from rlcore.algorithms.off_policy import ImportanceSampling
from rlcore.errors import ConfigError, DataError

PLAIN = PolicyLossSettings(clip_low=0.2, clip_high=0.28)
TIS = ImportanceSampling(low=0.7, high=1.4)
CASES = {
    "clipped": PLAIN,
    "dual clip": replace(PLAIN, dual_clip=1.5),
    "gspo": replace(PLAIN, surrogate="gspo", clip_low=0.05, clip_high=0.08),
    "gspo, dual clip": replace(PLAIN, surrogate="gspo", dual_clip=1.05),
    "cispo": replace(PLAIN, surrogate="cispo"),
    "entropy": replace(PLAIN, entropy_coef=0.3),
    "kl": replace(PLAIN, kl_coef=0.4),
    "opsm": replace(PLAIN, opsm_delta=0.02),
    "cispo, opsm": replace(PLAIN, surrogate="cispo", opsm_delta=0.02),
    "gspo, tis, kl, entropy": replace(
        PLAIN,
        surrogate="gspo",
        kl_coef=0.2,
        entropy_coef=0.1,
        sampling=replace(TIS, level="geometric"),
    ),
    **{
        f"unbiased {kind}": replace(PLAIN, kl_coef=0.4, kl_kind=kind, unbiased_kl=True)
        for kind in ("k1", "k2", "k3", "low_var_kl")
    },
    **{
        f"tis {level} {bounding}": replace(
            PLAIN, sampling=replace(TIS, level=level, bounding=bounding)
        )
        for level, bounding in product(("token", "sequence", "geometric"), ("clip", "mask"))
    },
}
BY_SEQUENCE = [name for name, settings in CASES.items() if settings.by_sequence]
LENGTHS = (5, 1, 9, 0, 7, 3)


def make_inputs(seed=0, dtype=torch.float64, spread=0.35, lengths=LENGTHS):
    """Sequences with masked tokens inside; advantages are of sequences, as a group's are."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(size=n):
        return torch.randn(size, generator=g, dtype=torch.float64).to(dtype)

    new = -1.0 - normal().abs()
    mask = torch.rand(n, generator=g) < 0.8
    drift = normal(len(lengths)).repeat_interleave(torch.tensor(lengths)) * 0.1
    return LossInputs(
        log_probs=new.clone().requires_grad_(),
        old_log_probs=new + spread * normal() + drift,
        ref_log_probs=new + spread * normal(),
        rollout_log_probs=new + spread * normal() + drift,
        advantages=normal(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        entropy=normal().abs(),
        mask=mask,
        weights=torch.where(mask, torch.rand(n, generator=g), 0.0).to(dtype),
        lengths=lengths,
    )


# --- the papers' formulas -------------------------------------------------------------------------


def bounded(x, low, high):
    return min(max(x, low), high)


def token_ratios(seq, s):
    """rho of each trained token: its own, or exp of the mean over its sequence (GSPO eq. 7)."""
    logs = [t["new"] - t["old"] for t in seq]
    if s.surrogate == "gspo":
        logs = [sum(logs) / len(logs)] * len(logs)
    return [math.exp(x) for x in logs]


def gain(rho, rho_before, t, s):
    """What a token adds to the objective that is made as large as possible."""
    a, low, high = t["advantages"], 1 - s.clip_low, 1 + s.clip_high
    if s.surrogate == "cispo":
        return bounded(rho_before, low, high) * a * t["new"]
    value = min(rho * a, bounded(rho, low, high) * a)
    if s.dual_clip is not None and a < 0:
        value = max(value, s.dual_clip * a)
    return value


def importance(seq, s):
    """Truncated importance sampling: one weight a token."""
    x = [t["old"] - t["roll"] for t in seq]
    if s.sampling.level == "sequence":
        x = [sum(x)] * len(x)
    elif s.sampling.level == "geometric":
        x = [sum(x) / len(x)] * len(x)
    weights = [math.exp(v) for v in x]
    low, high = s.sampling.low, s.sampling.high
    if s.sampling.bounding == "clip":
        return [bounded(w, low, high) for w in weights]
    return [w if low <= w <= high else 0.0 for w in weights]


def divergence(t, s):
    x = t["new"] - t["ref"]
    value = {"k1": x, "k2": x * x / 2}.get(s.kl_kind, math.exp(-x) - 1 + x)
    if s.unbiased_kl:
        value *= math.exp(t["new"] - t["old"])
    return bounded(value, -10, 10) if s.kl_kind == "low_var_kl" else value


def reference(inputs, s, new=None):
    """The loss of the papers. `new` in place of the log-probs, where a paper lets gradients pass:
    what it stops (ratios of cispo, importance weights, masks) stays that of `inputs`.
    """
    before = inputs.log_probs.detach().tolist()
    rows = [
        {"new": n, "before": b, "old": o, "ref": r, "roll": e, "advantages": a, "w": w, "H": h}
        | {"trained": m}
        for n, b, o, r, e, a, w, h, m in zip(
            before if new is None else new,
            before,
            *(
                getattr(inputs, name).tolist()
                for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
            ),
            *(getattr(inputs, name).tolist() for name in ("advantages", "weights", "entropy")),
            inputs.mask.tolist(),
            strict=True,
        )
    ]
    total, start = 0.0, 0
    for length in inputs.lengths:
        seq = [t for t in rows[start : start + length] if t["trained"]]
        start += length
        if not seq:
            continue
        at_first = [t | {"new": t["before"]} for t in seq]
        left = sum(t["old"] - t["before"] for t in seq) / len(seq)
        weights = [1.0] * len(seq) if s.sampling is None else importance(seq, s)
        ratios = zip(token_ratios(seq, s), token_ratios(at_first, s), strict=True)
        for t, (rho, rho_before), weight in zip(seq, ratios, weights, strict=True):
            loss = -gain(rho, rho_before, t, s) * weight
            if s.opsm_delta is not None and t["advantages"] < 0 and left > s.opsm_delta:
                loss = 0.0
            total += t["w"] * (loss + s.kl_coef * divergence(t, s) - s.entropy_coef * t["H"])
    return total


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_paper(name, seed):
    inputs = make_inputs(seed)
    got = policy_loss(inputs, CASES[name]).loss.item()
    assert got == pytest.approx(reference(inputs, CASES[name]), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_numeric_one_of_the_paper(name):
    """Central differences of the plain formula, with what it stops held fast."""
    inputs, settings, step = make_inputs(7), CASES[name], 1e-6
    policy_loss(inputs, settings).loss.backward()
    base = inputs.log_probs.detach().tolist()
    for i, got in enumerate(inputs.log_probs.grad.tolist()):
        sides = []
        for sign in (1, -1):
            moved = list(base)
            moved[i] += sign * step
            sides.append(reference(inputs, settings, moved))
        assert got == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=2e-8)


@pytest.mark.parametrize("name", [n for n, s in CASES.items() if s.surrogate != "cispo"])
def test_gradcheck(name):
    inputs = make_inputs(3)

    def loss(log_probs, entropy):
        given = replace(inputs, log_probs=log_probs, entropy=entropy)
        return policy_loss(given, CASES[name]).loss

    entropy = inputs.entropy.clone().requires_grad_(CASES[name].entropy_coef > 0)
    assert torch.autograd.gradcheck(loss, (inputs.log_probs, entropy))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_what_stands_at_masked_positions_never_matters(name, garbage):
    clean = make_inputs(dtype=torch.float32)
    want = policy_loss(clean, CASES[name])
    want.loss.backward()
    kept = ("mask", "lengths", "weigh", "reduce")
    tensors = [f.name for f in fields(clean) if f.name not in kept]
    dirty = {n: torch.where(clean.mask, getattr(clean, n).detach(), garbage) for n in tensors}
    inputs = replace(clean, **dirty)
    inputs.log_probs.requires_grad_()
    out = policy_loss(inputs, CASES[name])
    out.loss.backward()
    assert torch.equal(inputs.log_probs.grad, clean.log_probs.grad)
    for got, wanted in (
        (out.metrics.means, want.metrics.means),
        (out.metrics.maxima, want.metrics.maxima),
    ):
        assert {k: float(v) for k, v in got.items()} == {k: float(v) for k, v in wanted.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("gap", [50.0, -50.0, 1e4, -1e4, 1e30, -1e30, math.inf])
def test_extreme_log_ratios_give_finite_losses_and_gradients(name, gap, advantage):
    new = torch.tensor([-1.0, -abs(gap)] if gap < 0 else [-1.0, -1.0], requires_grad=True)
    other = torch.tensor([-1.0, -1.0 if gap < 0 else -gap])
    for rollout in (other, new.detach()):
        inputs = LossInputs(
            log_probs=new,
            old_log_probs=other,
            ref_log_probs=other,
            rollout_log_probs=rollout,
            advantages=torch.full((2,), advantage),
            entropy=torch.ones(2),
            mask=torch.ones(2, dtype=torch.bool),
            weights=torch.full((2,), 0.5),
            lengths=(2,),
        )
        out = policy_loss(inputs, CASES[name])
        out.loss.backward()
        assert out.loss.isfinite()
        assert new.grad.isfinite().all()
        assert all(float(v) == float(v) for v in out.metrics.means.values())


@pytest.mark.parametrize("name", CASES)
def test_zero_advantages_give_exactly_zero(name):
    settings = replace(CASES[name], kl_coef=0.0, entropy_coef=0.0)
    inputs = make_inputs(dtype=torch.float32)
    inputs = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    out = policy_loss(inputs, settings)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert not inputs.log_probs.grad.any()


@pytest.mark.parametrize("name", CASES)
def test_losses_and_metrics_of_whole_sequences_add_up(name):
    inputs = make_inputs()
    whole = policy_loss(inputs, CASES[name])
    parts, start = [], 0
    for length in inputs.lengths:
        some = {
            f.name: value[start : start + length]
            for f in fields(inputs)
            if isinstance(value := getattr(inputs, f.name), torch.Tensor)
        }
        parts.append(policy_loss(LossInputs(**some, lengths=(length,)), CASES[name]))
        start += length
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    merged = merge_metrics([p.metrics for p in parts])
    assert merged.means.keys() == whole.metrics.means.keys()
    for key, value in whole.metrics.means.items():
        assert float(merged.means[key]) == pytest.approx(float(value), rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("surrogate", ["clipped", "gspo", "cispo"])
def test_on_policy_every_surrogate_has_the_policy_gradient(surrogate):
    """With a weight per sequence, gspo gives its tokens the mean of what they get alone."""
    inputs = replace(make_inputs(), old_log_probs=None)
    even = torch.where(inputs.mask, 0.25, 0.0).double()
    inputs = replace(inputs, weights=even)
    policy_loss(inputs, replace(PLAIN, surrogate=surrogate)).loss.backward()
    want = torch.where(inputs.mask, -inputs.advantages * 0.25, 0.0)
    torch.testing.assert_close(inputs.log_probs.grad, want)


def test_gspo_clips_whole_sequences():
    new = torch.log(torch.tensor([1.5, 1.5, 1.0, 1.1], dtype=torch.float64)).requires_grad_()
    inputs = LossInputs(
        new,
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.bool),
        torch.full((4,), 0.25, dtype=torch.float64),
        torch.zeros(4, dtype=torch.float64),
        lengths=(2, 2),
    )
    out = policy_loss(inputs, replace(PLAIN, surrogate="gspo"))
    out.loss.backward()
    assert (new.grad == 0).tolist() == [True, True, False, False]
    assert float(out.metrics.means["pg_clipfrac"]) == pytest.approx(0.5)
    assert float(out.metrics.means["ois"]) == pytest.approx((1.5 + 1.1**0.5) / 2)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    new = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        new,
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
    )
    out = policy_loss(inputs, replace(PLAIN, surrogate="cispo"))
    out.loss.backward()
    assert new.grad.tolist() == pytest.approx([-1.28, -0.8, -1.0])
    assert float(out.metrics.means["pg_clipfrac_low"]) == 1.0
    assert float(out.metrics.means["pg_clipfrac_high"]) == 1.0


def test_the_dual_clip_bounds_the_loss_of_bad_tokens():
    new = torch.log(torch.tensor([8.0, 2.0, 8.0])).requires_grad_()
    inputs = LossInputs(
        new,
        torch.tensor([-1.0, -1.0, 1.0]),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3),
        torch.zeros(3),
    )
    out = policy_loss(inputs, replace(PLAIN, dual_clip=3.0))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(3.0 + 2.0 - 1.28)
    assert new.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert float(out.metrics.means["pg_clipfrac_dual"]) == 1.0


def test_an_entropy_bonus_pulls_at_the_entropy():
    inputs = make_inputs()
    entropy = inputs.entropy.clone().requires_grad_()
    policy_loss(replace(inputs, entropy=entropy), CASES["entropy"]).loss.backward()
    torch.testing.assert_close(entropy.grad, -0.3 * inputs.weights)


@pytest.mark.parametrize("name", BY_SEQUENCE)
def test_sequences_must_cover_the_tokens(name):
    with pytest.raises(DataError, match="have 24 tokens but log_probs has shape"):
        policy_loss(replace(make_inputs(), lengths=(20, 4)), CASES[name])


def test_what_is_lacking_is_named():
    inputs = make_inputs()
    with pytest.raises(ConfigError, match=r"algorithm\.use_tis"):
        policy_loss(replace(inputs, rollout_log_probs=None), CASES["tis token clip"])
    with pytest.raises(ConfigError, match="entropy_coef needs"):
        policy_loss(replace(inputs, entropy=None), CASES["entropy"])


@pytest.mark.parametrize("name", CASES)
def test_the_effect_is_what_the_gradient_is_multiplied_by(name):
    settings = replace(CASES[name], kl_coef=0.0, entropy_coef=0.0)
    if settings.surrogate == "gspo":
        pytest.skip("a token of gspo has the gradient of its whole sequence")
    inputs = make_inputs(4)
    out = policy_loss(inputs, settings)
    out.loss.backward()
    weights = torch.where(inputs.mask, inputs.weights, 1.0)
    effect = (inputs.log_probs.grad / (-inputs.advantages * weights))[inputs.mask]
    shares = inputs.weights[inputs.mask]
    means = out.metrics.means
    assert float(means["effect"]) == pytest.approx(float((effect * shares).sum()))
    assert float(means["effect_square"]) == pytest.approx(float((effect**2 * shares).sum()))


def test_the_effective_share_of_equal_says_is_one():
    assert effective_share(0.7, 0.49) == pytest.approx(1.0)
    assert effective_share(0.25, 0.25) == 0.25
    assert effective_share(0.0, 0.0) == 0.0
