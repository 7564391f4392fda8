"""Invariants of `rlcore.algorithms.values`, and the formula in plain Python."""

import math
from dataclasses import fields, replace

import pytest
import torch

from rlcore.algorithms.values import ValueInputs, value_loss
from rlcore.errors import DataError

CLIP = 0.2


def make_inputs(n=40, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(n, generator=g, dtype=torch.float64).to(dtype)

    old, mask = normal(), torch.rand(n, generator=g) < 0.7
    return ValueInputs(
        values=(old + 0.3 * normal()).requires_grad_(),
        old_values=old,
        returns=normal(),
        mask=mask,
        weights=torch.where(mask, torch.rand(n, generator=g), 0.0).to(dtype),
    )


def reference(inputs):
    total, clipped = 0.0, 0.0
    for t in range(len(inputs.mask)):
        if inputs.mask[t]:
            v, old, goal, w = (
                float(getattr(inputs, name)[t])
                for name in ("values", "old_values", "returns", "weights")
            )
            near = min(max(v, old - CLIP), old + CLIP)
            total += w * max((v - goal) ** 2, (near - goal) ** 2)
            clipped += w * ((near - goal) ** 2 > (v - goal) ** 2)
    return total, clipped


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_the_plain_formula(seed):
    inputs = make_inputs(seed=seed)
    detached = replace(inputs, values=inputs.values.detach())
    out = value_loss(inputs, CLIP)
    want, clipped = reference(detached)
    assert out.loss.item() == pytest.approx(want, rel=1e-12)
    assert 0 < clipped == pytest.approx(float(out.metrics.means["value_clipfrac"]))


def test_gradcheck():
    inputs = make_inputs(3)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(replace(inputs, values=v), CLIP).loss, inputs.values
    )


def test_a_value_that_the_clip_holds_back_has_no_gradient():
    values = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    inputs = ValueInputs(
        values,
        torch.zeros(3),
        torch.tensor([1.0, -1.0, 1.0]),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3),
    )
    value_loss(inputs, CLIP).loss.backward()
    # Towards its return it may not go further than the clip; back again it may.
    assert values.grad.tolist() == pytest.approx([0.0, 3.0, -1.8])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_masked_positions_never_matter(garbage):
    clean = make_inputs(dtype=torch.float32)
    want = value_loss(clean, CLIP)
    want.loss.backward()
    names = [f.name for f in fields(clean) if f.name != "mask"]
    dirty = {n: torch.where(clean.mask, getattr(clean, n).detach(), garbage) for n in names}
    inputs = replace(clean, **dirty)
    inputs.values.requires_grad_()
    out = value_loss(inputs, CLIP)
    out.loss.backward()
    assert out.loss.item() == want.loss.item()
    assert torch.equal(inputs.values.grad, clean.values.grad)


def test_no_trained_token_has_a_loss_of_zero_in_the_graph():
    inputs = replace(make_inputs(5), mask=torch.zeros(5, dtype=torch.bool))
    out = value_loss(inputs, CLIP)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert inputs.values.grad.tolist() == [0.0] * 5


def test_shapes_must_agree():
    with pytest.raises(DataError, match=r"returns has shape \(3,\) but values has \(40,\)"):
        value_loss(replace(make_inputs(), returns=torch.zeros(3)), CLIP)
