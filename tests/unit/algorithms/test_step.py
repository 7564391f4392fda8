"""One optimizer step through all parts: its loss and gradient do not depend on how it is cut."""

import math

import pytest
import torch

from rlcore.algorithms.advantages import AdvantageInputs, sample_advantages
from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.logprobs import chunked_log_probs
from rlcore.algorithms.losses import LossInputs, PolicyLossSettings, policy_loss
from rlcore.algorithms.metrics import merge_metrics
from rlcore.algorithms.packing import TrainSequence, pack, padded
from rlcore.algorithms.plan import plan

VOCABULARY, WIDTH, CONTEXT = 17, 12, 40
SETTINGS = PolicyLossSettings(clip_low=0.2, clip_high=0.28, kl_coef=0.02)
LOG_PROBS = ("old_log_probs", "ref_log_probs")


def make_model(dtype):
    g = torch.Generator().manual_seed(1)
    shapes = {"token": VOCABULARY, "position": CONTEXT, "head": VOCABULARY}
    return {
        name: (torch.randn(rows, WIDTH, generator=g, dtype=torch.float64).to(dtype) * 0.5)
        for name, rows in shapes.items()
    }


def make_batch():
    """24 samples of unequal lengths and groups: one without a reward, one fully masked, one cut."""
    g = torch.Generator().manual_seed(2)
    groups = [i // 5 for i in range(24)]
    rewards = torch.randint(0, 4, (24,), generator=g).tolist()
    rewards[3] = None
    out = sample_advantages(AdvantageInputs(rewards, groups))
    batch = []
    for i in range(24):
        prompt, response = 1 + i % 4, (i * 7) % 19
        mask = [0 if i == 8 else int(k % 5 != 2) for k in range(response)]
        noise = torch.randn(2, response, generator=g) * 0.3 - 2.5
        batch.append(
            TrainSequence(
                tokens=torch.randint(VOCABULARY, (prompt + response,), generator=g).tolist(),
                response_length=response,
                loss_mask=mask,
                advantages=out.advantages[i],
                old_log_probs=noise[0].tolist(),
                ref_log_probs=noise[1].tolist(),
                trainable=out.trainable[i],
            )
        )
    return batch


def reference(batch, how):
    """Loss and gradients of the step in float64, sequence by sequence, from the papers."""
    model = {k: v.requires_grad_() for k, v in make_model(torch.float64).items()}
    per_sequence = []
    for s in batch:
        ids = torch.tensor(s.tokens)
        hidden = torch.tanh(model["token"][ids] + model["position"][: len(ids)])
        log_p = (hidden @ model["head"].T / 0.8).log_softmax(-1)
        terms = []
        for k in range(s.response_length):
            if not (s.trainable and s.loss_mask[k]):
                continue
            t = len(ids) - s.response_length + k
            new = log_p[t - 1, ids[t]]
            rho = (new - s.old_log_probs[k]).exp()
            gain = torch.minimum(rho * s.advantages, rho.clamp(0.8, 1.28) * s.advantages)
            x = s.ref_log_probs[k] - new
            terms.append(-gain + 0.02 * (x.exp() - x - 1))
        if terms:
            per_sequence.append(torch.stack(terms))
    if how == "token_mean":
        loss = torch.cat(per_sequence).mean()
    else:
        loss = torch.stack([terms.mean() for terms in per_sequence]).mean()
    loss.backward()
    return loss.detach(), {k: v.grad for k, v in model.items()}


def run_step(batch, how, *, layout, dp_size, select, **cut):
    """Sums loss and gradients of all micro-batches of all ranks, as the trainers do."""
    model = {k: v.requires_grad_() for k, v in make_model(torch.float32).items()}
    lengths = [len(s.tokens) for s in batch]
    (step,) = plan(lengths, dp_size=dp_size, num_steps=1, **{"max_tokens": 64, **cut}).steps
    totals = Totals.of(batch[i].trainable_tokens for i in step.samples)
    outputs = []
    for m in (m for rank in step.ranks for m in rank):
        t = layout([batch[i] for i in m.samples], totals, how, log_probs=LOG_PROBS)
        hidden = torch.tanh(model["token"][t.input_ids] + model["position"][t.position_ids])
        rows = t.loss_mask if select else torch.ones_like(t.loss_mask)
        log_probs, entropy = chunked_log_probs(
            hidden[rows], model["head"], t.targets[rows], 0.8, chunk=16
        )
        inputs = LossInputs(
            log_probs=log_probs,
            advantages=t.advantages[rows],
            mask=t.loss_mask[rows],
            weights=t.loss_weights[rows],
            old_log_probs=t.old_log_probs[rows],
            ref_log_probs=t.ref_log_probs[rows],
            entropy=entropy,
        )
        outputs.append(policy_loss(inputs, SETTINGS))
        outputs[-1].loss.backward()
    metrics = merge_metrics([out.metrics for out in outputs])
    return metrics, {k: v.grad for k, v in model.items()}


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("layout", [pack, padded])
@pytest.mark.parametrize("dp_size", [1, 2, 5])
@pytest.mark.parametrize("cut", [{"fixed_micro_batches": 1}, {"fixed_micro_batches": 4}, {}])
def test_any_ranks_micro_batches_and_layout_give_the_step_of_the_papers(how, layout, dp_size, cut):
    batch = make_batch()
    loss, grads = reference(batch, how)
    for select in (False, True):
        metrics, got = run_step(batch, how, layout=layout, dp_size=dp_size, select=select, **cut)
        # Gains and losses of tokens are near 1 and cancel to about 0.01: the sum is what rounds.
        assert metrics.means["loss"].item() == pytest.approx(loss.item(), abs=1e-7)
        for name, want in grads.items():
            assert (got[name].double() - want).norm() <= 1e-6 * want.norm()


def test_more_ranks_than_samples_enter_backward_everywhere():
    batch = make_batch()[4:6]
    loss, grads = reference(batch, "token_mean")
    metrics, got = run_step(batch, "token_mean", layout=pack, dp_size=4, select=True)
    assert metrics.means["loss"].item() == pytest.approx(loss.item(), abs=1e-7)
    assert (got["head"].double() - grads["head"]).norm() <= 1e-6 * grads["head"].norm()


def test_a_step_without_a_trainable_token_has_zero_loss_and_gradient():
    batch = [
        TrainSequence(
            [1, 2, 3],
            2,
            trainable=False,
            old_log_probs=[math.nan] * 2,
            ref_log_probs=[math.nan] * 2,
        )
    ]
    metrics, got = run_step(batch, "sequence_mean", layout=pack, dp_size=2, select=False)
    assert float(metrics.means["loss"]) == 0.0
    assert all(g is not None and not g.any() for g in got.values())
