"""Cross-entropy of demonstrations against float64, and what must never matter to it."""

import math

import pytest
import torch

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.demonstrations import Demonstrations, cross_entropy, perplexity
from rlcore.algorithms.logprobs import token_log_probs
from rlcore.algorithms.packing import TrainSequence, pack
from rlcore.errors import DataError

VOCABULARY = 11


def batch():
    """Seven sequences of mixed lengths and masks, one of them masked as a whole."""
    g = torch.Generator().manual_seed(4)
    made = []
    for k in range(7):
        prompt, response = 1 + k % 3, 1 + (k * 5) % 8
        mask = [int(k != 3 and t % 3 != 1) for t in range(response)]
        tokens = torch.randint(VOCABULARY, (prompt + response,), generator=g).tolist()
        made.append(TrainSequence(tokens, response, loss_mask=mask))
    return made


def logits_of(sequences, dtype):
    g = torch.Generator().manual_seed(5)
    return [
        torch.randn(len(s.tokens), VOCABULARY, generator=g, dtype=torch.float64).to(dtype)
        for s in sequences
    ]


def reference(sequences, how):
    """Loss and gradients in float64, written out a token at a time."""
    logits = [x.requires_grad_() for x in logits_of(sequences, torch.float64)]
    means, every = [], []
    for s, x in zip(sequences, logits, strict=True):
        own = []
        for t in range(len(s.tokens) - s.response_length, len(s.tokens)):
            if s.loss_mask[t - len(s.tokens) + s.response_length]:
                row = x[t - 1]
                own.append(row.exp().sum().log() - row[s.tokens[t]])
        every += own
        means += [torch.stack(own).mean()] if own else []
    loss = torch.stack(every if how == "token_mean" else means).mean()
    # Masked as a whole, a sequence has a gradient of 0.
    (loss + 0 * sum(x.sum() for x in logits)).backward()
    return loss.item(), torch.cat([x.grad for x in logits])


def loss_of(sequences, logits, how, parts=1):
    totals = Totals.of(s.trainable_tokens for s in sequences)
    outs = []
    for part in range(parts):
        own = range(part, len(sequences), parts)
        packed = pack([sequences[i] for i in own], totals, how)
        rows = torch.cat([logits[i] for i in own])
        log_probs, entropy = token_log_probs(rows, packed.targets)
        outs.append(
            cross_entropy(Demonstrations(log_probs, packed.loss_mask, packed.loss_weights, entropy))
        )
    return outs


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradient_are_those_of_float64(how, parts):
    sequences = batch()
    expected, gradient = reference(sequences, how)
    logits = [x.requires_grad_() for x in logits_of(sequences, torch.float32)]
    outs = loss_of(sequences, logits, how, parts)
    loss = sum(out.loss for out in outs)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert sum(out.metrics.means["loss"] for out in outs) == pytest.approx(expected, rel=1e-6)
    found = torch.cat([x.grad for x in logits]).double()
    assert (found - gradient).norm() <= 1e-6 * gradient.norm()


def test_the_gradient_is_the_numeric_one():
    mask = torch.tensor([True, False, True, True])
    weights = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    log_probs = torch.tensor([-0.1, -2.0, -3.0, -7.0], dtype=torch.float64, requires_grad=True)

    def loss(values):
        return cross_entropy(Demonstrations(values, mask, weights)).loss

    assert torch.autograd.gradcheck(loss, (log_probs,))


def test_what_stands_at_masked_positions_never_matters():
    log_probs = torch.tensor([-1.0, math.nan, -math.inf, -2.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    weights = torch.tensor([0.5, math.nan, 0.0, 0.5])
    out = cross_entropy(Demonstrations(log_probs, mask, weights))
    out.loss.backward()
    assert out.loss.item() == 1.5
    assert log_probs.grad.tolist() == [-0.5, 0.0, 0.0, -0.5]
    assert out.metrics.maxima["token_loss_max"].item() == 2.0


def test_no_trained_token_is_a_loss_of_zero_within_the_graph():
    log_probs = torch.tensor([math.nan], requires_grad=True)
    out = cross_entropy(Demonstrations(log_probs, torch.tensor([False]), torch.zeros(1)))
    out.loss.backward()
    assert (out.loss.item(), log_probs.grad.item()) == (0.0, 0.0)


def test_a_certain_token_costs_nothing_and_an_impossible_one_is_finite():
    logits = torch.tensor([[100.0, -100.0], [-1e30, 1e4]], requires_grad=True)
    log_probs, _ = token_log_probs(logits, torch.tensor([0, 0]))
    out = cross_entropy(Demonstrations(log_probs, torch.ones(2).bool(), torch.full((2,), 0.5)))
    out.loss.backward()
    assert math.isfinite(out.loss.item()) and torch.isfinite(logits.grad).all()


def test_shapes_must_agree():
    with pytest.raises(DataError, match="weights has shape"):
        cross_entropy(Demonstrations(torch.zeros(2), torch.ones(2).bool(), torch.zeros(3)))


def test_perplexity_is_the_exponential_and_stays_finite():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert math.isfinite(perplexity(1e9))
