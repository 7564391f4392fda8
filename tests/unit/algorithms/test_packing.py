"""Invariants of `rlcore.algorithms.packing`."""

from dataclasses import fields, replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.aggregate import Totals, token_weight
from rlcore.algorithms.packing import LogProbs, TokenTensors, TrainSequence, pack, padded
from rlcore.errors import DataError

ALL = get_args(LogProbs)
TENSORS = [f.name for f in fields(TokenTensors)]


@st.composite
def sequences(draw):
    prompt, response = draw(st.integers(1, 6)), draw(st.integers(0, 8))

    def of_response(elements):
        return st.lists(elements, min_size=response, max_size=response)

    numbers = st.floats(-8, 8, width=32)
    return TrainSequence(
        tokens=draw(
            st.lists(st.integers(0, 99), min_size=prompt + response, max_size=prompt + response)
        ),
        response_length=response,
        loss_mask=draw(st.none() | of_response(st.integers(0, 1))),
        advantages=draw(numbers | of_response(numbers)),
        old_log_probs=draw(of_response(numbers)),
        rollout_log_probs=draw(of_response(numbers)),
        ref_log_probs=draw(of_response(numbers)),
        teacher_log_probs=draw(of_response(numbers)),
        trainable=draw(st.booleans()),
    )


batches = st.lists(sequences(), min_size=1, max_size=6)
hows = st.sampled_from(["token_mean", "sequence_mean"])


def totals_of(batch):
    return Totals.of(s.trainable_tokens for s in batch)


def mask_of(s):
    mask = [1] * s.response_length if s.loss_mask is None else s.loss_mask
    return [bool(m) and s.trainable for m in mask]


@given(batches, hows)
def test_each_value_stands_where_the_logits_predict_its_token(batch, how):
    totals = totals_of(batch)
    out = pack(batch, totals, how, log_probs=ALL)
    for s, start in zip(batch, out.cu_seqlens.tolist(), strict=False):
        prompt = len(s.tokens) - s.response_length
        weight = np.float32(token_weight(s.trainable_tokens, totals, how))
        for k in range(s.response_length):
            t = start + prompt - 1 + k
            assert out.targets[t] == out.input_ids[t + 1] == s.tokens[prompt + k]
            assert bool(out.loss_mask[t]) == mask_of(s)[k]
            assert out.loss_weights[t].item() == (weight if mask_of(s)[k] else 0)
            want = s.advantages if isinstance(s.advantages, float) else s.advantages[k]
            assert out.advantages[t].item() == want
            for name in ALL:
                assert getattr(out, name)[t].item() == getattr(s, name)[k]


@given(batches, hows)
def test_only_trained_tokens_have_mask_and_weight(batch, how):
    out = pack(batch, totals_of(batch), how)
    assert out.loss_mask.sum() == sum(s.trainable_tokens for s in batch)
    assert not out.loss_weights[~out.loss_mask].any()
    assert (out.loss_weights[out.loss_mask] > 0).all()
    total = out.loss_weights.double().sum().item()
    assert total == pytest.approx(1.0 if out.loss_mask.any() else 0.0, abs=1e-5)
    assert not out.loss_mask[out.cu_seqlens[1:].long() - 1].any()


@given(batches, hows)
def test_positions_restart_and_boundaries_are_the_sequences(batch, how):
    out = pack(batch, totals_of(batch), how)
    lengths = [len(s.tokens) for s in batch]
    assert out.cu_seqlens.dtype == torch.int32
    assert out.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert out.lengths == tuple(lengths)
    assert out.position_ids.tolist() == [t for n in lengths for t in range(n)]
    assert out.input_ids.tolist() == [i for s in batch for i in s.tokens]


@given(batches, hows)
def test_packed_and_padded_hold_the_same_numbers(batch, how):
    totals = totals_of(batch)
    flat = pack(batch, totals, how, log_probs=ALL)
    grid = padded(batch, totals, how, log_probs=ALL, pad_id=7)
    real = grid.attention_mask.bool()
    assert real.sum(1).tolist() == list(grid.lengths) == list(flat.lengths)
    for name in TENSORS:
        packed_values, grid_values = getattr(flat, name), getattr(grid, name)
        assert packed_values.dtype == grid_values.dtype
        assert torch.equal(packed_values, grid_values[real])
        assert (grid_values[~real] == (7 if name == "input_ids" else 0)).all()


@given(batches, hows)
def test_a_sequence_does_not_depend_on_its_neighbours(batch, how):
    totals = totals_of(batch)
    together = pack(batch, totals, how, log_probs=ALL)
    for i, s in enumerate(batch):
        alone = pack([s], totals, how, log_probs=ALL)
        part = slice(*together.cu_seqlens[i : i + 2].tolist())
        for name in TENSORS:
            assert torch.equal(getattr(together, name)[part], getattr(alone, name))


@given(batches)
def test_per_sequence_gives_the_values_of_all_tokens_but_the_first(batch):
    totals = totals_of(batch)
    for out in (pack(batch, totals, "token_mean"), padded(batch, totals, "token_mean")):
        parts = out.per_sequence(out.targets)
        assert [p.tolist() for p in parts] == [list(s.tokens[1:]) for s in batch]


@given(batches)
def test_inputs_lack_only_the_last_token_of_each_sequence(batch):
    whole = pack(batch, totals_of(batch), "token_mean", log_probs=ALL)
    out = whole.inputs()
    assert out.lengths == tuple(max(1, len(s.tokens) - 1) for s in batch)
    edges, whole_edges = out.cu_seqlens.tolist(), whole.cu_seqlens.tolist()
    assert len(edges) == len(batch) + 1
    for start, end, first in zip(edges, edges[1:], whole_edges, strict=False):
        for name in TENSORS:
            expected = getattr(whole, name)[first : first + end - start]
            assert torch.equal(getattr(out, name)[start:end], expected)
    assert out.loss_mask.sum() == whole.loss_mask.sum()


@pytest.mark.parametrize("layout", [pack, padded])
def test_no_sequences_make_one_masked_token_with_the_same_tensors(layout):
    out = layout([], Totals(tokens=10, sequences=2), "token_mean", log_probs=ALL)
    assert out.input_ids.numel() == 1
    assert not out.loss_mask.any()
    assert not out.loss_weights.any()
    assert all(getattr(out, name).numel() == 1 for name in TENSORS)


def test_log_probs_not_asked_for_are_none_and_missing_ones_an_error():
    s = TrainSequence(tokens=[1, 2], response_length=1, old_log_probs=[-1.0])
    totals = totals_of([s])
    assert pack([s], totals, "token_mean").old_log_probs is None
    assert pack([s], totals, "token_mean", log_probs=["old_log_probs"]).ref_log_probs is None
    bare = TrainSequence(tokens=[1, 2], response_length=1)
    with pytest.raises(DataError, match="sequence 1 of the micro-batch has no old_log_probs"):
        pack([s, bare], totals, "token_mean", log_probs=["old_log_probs"])


def test_a_token_id_of_zero_at_the_end_is_a_token():
    s = TrainSequence(tokens=[5, 0, 0], response_length=2)
    out = padded([s, TrainSequence([1, 2, 3, 4], 1)], Totals(3, 2), "token_mean")
    assert out.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert out.loss_mask[0].tolist() == [True, True, False, False]


def test_arrays_and_lists_are_the_same():
    listed = TrainSequence([1, 2, 3], 2, [0, 1], [0.5, 1.5], old_log_probs=[-1.0, -2.0])
    arrays = TrainSequence(
        np.array([1, 2, 3], dtype=np.int32),
        2,
        np.array([0, 1], dtype=np.int8),
        np.array([0.5, 1.5]),
        old_log_probs=np.array([-1.0, -2.0], dtype=np.float32),
    )
    assert listed.trainable_tokens == arrays.trainable_tokens == 1
    a, b = (pack([s], Totals(1, 1), "token_mean", log_probs=ALL[:1]) for s in (listed, arrays))
    assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in TENSORS[:7])


def test_to_moves_every_tensor_and_keeps_what_is_none():
    out = pack([TrainSequence([1, 2], 1)], Totals(1, 1), "token_mean").to("meta")
    assert out.input_ids.device.type == out.cu_seqlens.device.type == "meta"
    assert out.old_log_probs is None
    assert out.lengths == (2,)


def test_lengths_that_do_not_fit_are_named():
    good = TrainSequence([1, 2, 3], 2)
    for bad, message in [
        (replace(good, response_length=3), "3 tokens and a response of 3: the prompt must have"),
        (replace(good, response_length=-1), "response of -1"),
        (replace(good, loss_mask=[1]), "sequence 1 of the micro-batch has 1 loss_mask"),
        (replace(good, advantages=[1.0] * 3), "3 advantages for a response of 2"),
        (replace(good, old_log_probs=[1.0]), "1 old_log_probs"),
    ]:
        fine = replace(good, old_log_probs=[-1.0, -1.0])
        bad = bad if bad.old_log_probs is not None else replace(bad, old_log_probs=[-1.0, -1.0])
        with pytest.raises(DataError, match=message):
            pack([fine, bad], Totals(4, 2), "token_mean", log_probs=["old_log_probs"])


def test_the_tokens_of_an_execution_share_one_sequence_s_weight():
    parts = [TrainSequence([1, 2, 3], 2, execution_tokens=5), TrainSequence([4] * 6, 3)]
    parts[1] = replace(parts[1], execution_tokens=5)
    other = TrainSequence([9, 9], 1)
    totals = Totals.of([5, 1])
    weights = pack([*parts, other], totals, "sequence_mean").loss_weights
    assert weights.double().sum().item() == pytest.approx(1.0, abs=1e-6)
    assert set(weights[weights > 0].tolist()) == {np.float32(0.1).item(), 0.5}
    even = pack([*parts, other], totals, "token_mean").loss_weights
    assert set(even[even > 0].tolist()) == {np.float32(1 / 6).item()}
