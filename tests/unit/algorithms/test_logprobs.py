"""Invariants of `rlcore.algorithms.logprobs`, against log_softmax written out."""

import math

import pytest
import torch

from rlcore.algorithms import logprobs
from rlcore.algorithms.logprob_kernels import logits_gradient, row_statistics
from rlcore.algorithms.logprobs import chunked_log_probs, token_log_probs
from rlcore.errors import ConfigError, DataError

CHUNKS = [1, 3, 7, 16, None]


def problem(tokens=7, width=5, vocabulary=11, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=g)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden, weight, targets, temperature):
    """softmax(z / T) by its definition, in the inputs' dtype."""
    z = hidden @ weight.T / temperature
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    return p[torch.arange(len(targets)), targets].log(), -(p * p.log()).sum(-1)


def gradients(function, hidden, weight, grads):
    outputs = function()
    return [v.detach() for v in outputs], torch.autograd.grad(outputs, (hidden, weight), grads)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_and_gradients_match_the_plain_formula(temperature, chunk):
    h, w, y = problem()
    grads = [torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    want = gradients(lambda: plain(h, w, y, temperature), h, w, grads)
    got = gradients(lambda: chunked_log_probs(h, w, y, temperature, chunk), h, w, grads)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    from_logits = gradients(lambda: token_log_probs(h @ w.T, y, temperature, chunk), h, w, grads)
    torch.testing.assert_close(from_logits, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, None])
def test_gradients_match_numeric_ones(chunk):
    h, w, y = problem()
    assert torch.autograd.gradcheck(lambda a, b: chunked_log_probs(a, b, y, 0.8, chunk), (h, w))
    logits = (h @ w.T).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: token_log_probs(z, y, 0.8, chunk), (logits,))


@pytest.mark.parametrize("which", [0, 1])
def test_each_output_alone_can_be_differentiated(which):
    h, w, y = problem()
    want = torch.autograd.grad(plain(h, w, y, 0.9)[which].sum(), (h, w))
    got = torch.autograd.grad(chunked_log_probs(h, w, y, 0.9, 3)[which].sum(), (h, w))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_float32_is_right_to_1e_minus_5(chunk):
    h, w, y = problem(64, 32, 500, torch.float32)
    want = plain(h.double(), w.double(), y, 1.0)
    got = chunked_log_probs(h, w, y, 1.0, chunk)
    assert [v.dtype for v in got] == [torch.float32] * 2
    torch.testing.assert_close([v.double() for v in got], list(want), rtol=1e-5, atol=1e-5)


def test_bfloat16_inputs_are_computed_on_in_float32():
    h, w, y = problem(40, 32, 200, torch.bfloat16)
    z = (h @ w.T).float()
    want = z.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    got, entropy = chunked_log_probs(h, w, y, 1.0, 8)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert entropy.dtype == torch.float32
    want_grads = torch.autograd.grad(want.sum(), (h, w))
    got_grads = torch.autograd.grad(got.sum(), (h, w))
    assert [g.dtype for g in got_grads] == [torch.bfloat16] * 2
    torch.testing.assert_close(got_grads, want_grads, rtol=2e-2, atol=2e-2)


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e38, 0.0, -3e38]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 0]))
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.tolist() == [-2e4, 0.0]
    assert entropy.tolist() == [0.0, 0.0]
    assert logits.grad.isfinite().all()


def test_logits_of_minus_infinity_have_probability_zero():
    open_ids = torch.randn(4, 6, dtype=torch.float64)
    y = torch.tensor([0, 5, 2, 3])
    closed = torch.full((4, 2), -math.inf, dtype=torch.float64)
    logits = torch.cat([open_ids, closed], 1).requires_grad_()
    want = token_log_probs(open_ids.requires_grad_(), y)
    got = token_log_probs(logits, y)
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got[0].sum() + 3 * got[1].sum(), logits)
    (grad_open,) = torch.autograd.grad(want[0].sum() + 3 * want[1].sum(), open_ids)
    torch.testing.assert_close(grad, torch.cat([grad_open, torch.zeros_like(closed)], 1))
    assert token_log_probs(logits, torch.full((4,), 7))[0].isfinite().all()


@pytest.mark.parametrize("chunk", [2, None])
def test_a_row_without_gradient_adds_exactly_nothing(chunk):
    h, w, y = problem()
    rows = torch.tensor([True, False, True, True, False, True, False])
    want = torch.autograd.grad(chunked_log_probs(h, w, y, 1.0, chunk)[0][rows].sum(), (h, w))
    for garbage in (math.nan, math.inf):
        dirty = torch.where(rows[:, None], h.detach(), garbage).requires_grad_()
        lp, entropy = chunked_log_probs(dirty, w, y, 1.0, chunk)
        zero = torch.zeros((), dtype=torch.float64)
        loss = torch.where(rows, lp, zero).sum() + 0.0 * torch.where(rows, entropy, zero).sum()
        got = torch.autograd.grad(loss, (dirty, w))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
        assert got[0][~rows].abs().sum() == 0
        logits = torch.where(rows[:, None], (h @ w.T).detach(), garbage).requires_grad_()
        lp, _ = token_log_probs(logits, y, 1.0, chunk)
        (grad,) = torch.autograd.grad(torch.where(rows, lp, zero).sum(), logits)
        assert grad[~rows].abs().sum() == 0
        assert grad.isfinite().all()


def test_no_rows_are_still_part_of_the_graph():
    h, w, y = problem(tokens=0)
    lp, entropy = chunked_log_probs(h, w, y)
    assert lp.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(lp.sum() + entropy.sum(), (h, w))
    assert grads[0].shape == (0, 5)
    assert not grads[1].any()


def test_a_small_problem_is_one_chunk_and_a_large_one_never_holds_all_logits(monkeypatch):
    seen = []
    original = logprobs._scaled

    def spy(z, temperature):
        seen.append(tuple(z.shape))
        return original(z, temperature)

    def shapes_seen():
        seen.clear()
        chunked_log_probs(h, w, y)[0].sum().backward()
        return seen

    monkeypatch.setattr(logprobs, "_scaled", spy)
    h, w, y = problem(tokens=100)
    assert set(shapes_seen()) == {(100, 11)}
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", 11 * 30)
    assert set(shapes_seen()) == {(30, 11), (10, 11)}


@pytest.mark.parametrize("room", [0, 11 * 3, 11 * 5, 11 * 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kept_logits_change_no_number(monkeypatch, dtype, room):
    h, w, y = problem(dtype=dtype)
    dirty = torch.tensor([False, True, False, False, False, False, True])
    h = torch.where(dirty[:, None], math.nan, h.detach()).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    grads = [torch.randn(7, dtype=wide).masked_fill(dirty, 0.0) for _ in range(2)]

    def found(room):
        monkeypatch.setattr(logprobs, "_room_to_keep", lambda hidden: room)
        values, gradient = gradients(lambda: chunked_log_probs(h, w, y, 0.7, 3), h, w, grads)
        return [v.nan_to_num(1.0) for v in values], gradient

    torch.testing.assert_close(found(room), found(0), rtol=0, atol=0)
    assert not found(room)[1][0][dirty].any()


def test_logits_are_kept_only_for_a_backward_that_comes(monkeypatch):
    h, w, y = problem()
    monkeypatch.setattr(logprobs, "_room_to_keep", lambda hidden: 11 * 5)
    log_probs, _ = chunked_log_probs(h, w, y, 1.0, 3)
    node = log_probs.grad_fn
    assert [len(z) for z in node.kept] == [3]
    log_probs.sum().backward()
    assert node.kept == []
    with torch.no_grad():
        monkeypatch.setattr(logprobs, "_room_to_keep", lambda hidden: pytest.fail("asked"))
        chunked_log_probs(h, w, y, 1.0, 3)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_a_gpu_compiles_says_the_same(temperature, with_entropy):
    h, w, y = problem(dtype=torch.float32)
    logits = (h @ w.T).detach()
    logits[2, (y[2] + 1) % 11] = -math.inf
    logits.requires_grad_()
    want = token_log_probs(logits, y, temperature)
    grads = [torch.randn(7), torch.randn(7) if with_entropy else None]
    outputs = want if with_entropy else want[:1]
    gradient = torch.autograd.grad(outputs, logits, grads[: len(outputs)])[0]

    log_probs, entropy, shifts = row_statistics(logits.detach(), y, temperature)
    torch.testing.assert_close((log_probs, entropy), want, rtol=1e-5, atol=1e-6)
    dead = torch.zeros(7, dtype=torch.bool)
    more = (shifts, grads[0], entropy, grads[1], temperature)
    got = logits_gradient(logits.detach(), y, dead, *more)
    torch.testing.assert_close(got, gradient)

    dead[3] = True
    dirty = torch.where(dead[:, None], math.nan, logits.detach())
    for one in (shifts, entropy, *(g for g in grads if g is not None)):
        one[3] = 0.0
    got_dirty = logits_gradient(dirty, y, dead, *more)
    assert not got_dirty[3].any()
    torch.testing.assert_close(got_dirty[~dead], got[~dead], rtol=0, atol=0)


def test_wrong_inputs_are_named():
    h, w, y = problem()
    with pytest.raises(DataError, match=r"hidden is \(7, 5\) and weight \(11, 4\)"):
        chunked_log_probs(h, w[:, :4], y)
    with pytest.raises(DataError, match=r"targets are \(6,\); they must be \[7\]"):
        chunked_log_probs(h, w, y[:6])
    with pytest.raises(DataError, match="must be"):
        token_log_probs(torch.zeros(7), y)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=r"rollout\.temperature"):
            chunked_log_probs(h, w, y, temperature)
    with pytest.raises(ConfigError, match="chunk is 0"):
        chunked_log_probs(h, w, y, chunk=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_target_elsewhere_pulls_at_no_logit(monkeypatch, compiled):
    def as_written(function, *given, temperature):
        return function(*given, temperature)

    monkeypatch.setattr(logprobs, "_is_compiled", lambda z: compiled)
    monkeypatch.setattr(logprobs, "run_compiled", as_written)
    h, w, y = problem(dtype=torch.float32)
    elsewhere = y.clone()
    elsewhere[[1, 4]] = -1
    log_probs, _ = chunked_log_probs(h, w, elsewhere, 0.7, whole=lambda found: found)
    got = torch.autograd.grad(log_probs.sum(), h)[0]
    p = (h @ w.T / 0.7).softmax(-1)
    hit = torch.nn.functional.one_hot(y, 11).float()
    hit[[1, 4]] = 0.0
    torch.testing.assert_close(got, ((hit - p) / 0.7 @ w).detach(), rtol=1e-5, atol=1e-6)
