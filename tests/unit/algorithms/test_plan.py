"""Invariants of `rlcore.algorithms.plan` and `rlcore.algorithms.flops`."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algorithms.flops import ModelShape, forward_flops
from rlcore.algorithms.plan import plan
from rlcore.errors import ConfigError, DataError


@st.composite
def arguments(draw):
    num_steps = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 120), min_size=num_steps, max_size=60))
    return {
        "lengths": lengths,
        "num_steps": num_steps,
        "dp_size": draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(1, 300)),
        "costs": draw(st.none() | st.just([n + n * n / 50 for n in lengths])),
        "fixed_micro_batches": draw(st.none() | st.integers(1, 5)),
    }


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_an_execution_is_in_one_step_and_steps_count_executions(sizes, steps, ranks):
    of = [100 + k for k, size in enumerate(sizes) for _ in range(size)]
    steps = min(steps, len(sizes))
    out = plan([7] * len(of), max_tokens=20, dp_size=ranks, num_steps=steps, executions=of)
    parts = [[of[i] for i in step.samples] for step in out.steps]
    assert [e for part in parts for e in part] == of
    counts = [len(set(part)) for part in parts]
    assert sum(counts) == len(sizes) and max(counts) - min(counts) <= 1
    with pytest.raises(DataError, match="samples are left to train"):
        plan([7] * len(of), max_tokens=20, dp_size=1, num_steps=len(sizes) + 1, executions=of)


def micro_batches(step):
    return [m for rank in step.ranks for m in rank]


@given(arguments())
def test_every_sample_is_in_exactly_one_micro_batch(args):
    out = plan(**args)
    for step in out.steps:
        assert sorted(i for m in micro_batches(step) for i in m.samples) == list(step.samples)
    assert [i for s in out.steps for i in s.samples] == list(range(len(args["lengths"])))
    by_rank = sorted(i for rank in range(args["dp_size"]) for i in out.samples_of(rank))
    assert by_rank == list(range(len(args["lengths"])))


@given(arguments())
def test_steps_are_cut_in_order_and_of_equal_size(args):
    sizes = [len(s.samples) for s in plan(**args).steps]
    assert len(sizes) == args["num_steps"]
    assert max(sizes) - min(sizes) <= 1


@given(arguments())
def test_all_ranks_have_the_same_number_of_micro_batches(args):
    for step in plan(**args).steps:
        assert len(step.ranks) == args["dp_size"]
        assert {len(rank) for rank in step.ranks} == {step.num_micro_batches}
        if args["fixed_micro_batches"]:
            assert step.num_micro_batches == args["fixed_micro_batches"]


@given(arguments())
def test_no_micro_batch_exceeds_the_cap_but_a_single_long_sample(args):
    for step in plan(**args).steps:
        for m in micro_batches(step):
            assert m.tokens == sum(args["lengths"][i] for i in m.samples)
            assert m.empty == (m.tokens == 0)
            if args["fixed_micro_batches"] is None and len(m.samples) > 1:
                assert m.tokens <= args["max_tokens"]


@given(arguments())
def test_no_slot_is_empty_on_all_ranks(args):
    for step in plan(**{**args, "fixed_micro_batches": None}).steps:
        for slot in zip(*step.ranks, strict=True):
            assert not all(m.empty for m in slot)


@given(arguments())
def test_micro_batches_go_from_dearest_to_cheapest_and_samples_ascend(args):
    costs = args["costs"] or args["lengths"]
    for step in plan(**args).steps:
        for rank in step.ranks:
            loads = [sum(costs[i] for i in m.samples) for m in rank]
            assert loads == sorted(loads, reverse=True)
            assert all(list(m.samples) == sorted(m.samples) for m in rank)


@given(arguments())
def test_the_plan_depends_on_the_arguments_alone(args):
    assert plan(**args) == plan(**args)


@given(arguments())
def test_no_rank_is_dearer_than_the_mean_and_one_sample(args):
    costs = args["costs"] or args["lengths"]
    for step in plan(**args).steps:
        loads = [sum(costs[i] for m in rank for i in m.samples) for rank in step.ranks]
        mine = [costs[i] for i in step.samples]
        # Graham: no order of list scheduling ends more than one sample above the mean.
        mean = sum(mine) / args["dp_size"]
        assert max(loads) <= mean + (1 - 1 / args["dp_size"]) * max(mine) + 1e-6


def test_a_full_batch_is_cut_into_global_batches_and_shared_equally():
    out = plan([64] * 32, max_tokens=256, dp_size=2, num_steps=2)
    assert [s.samples for s in out.steps] == [tuple(range(16)), tuple(range(16, 32))]
    for step in out.steps:
        assert step.num_micro_batches == 2
        assert {m.tokens for m in micro_batches(step)} == {256}


def test_a_sample_longer_than_the_cap_goes_alone():
    out = plan([10, 500, 10], max_tokens=100, dp_size=1, num_steps=1)
    assert [m.samples for m in out.steps[0].ranks[0]] == [(1,), (0, 2)]


def test_samples_that_fit_only_one_way_keep_to_the_cap():
    # Spread evenly, 2 + 2 + 3 would be over; only {3, 3} and {2, 2, 2} fit.
    (step,) = plan([3, 3, 2, 2, 2], max_tokens=6, dp_size=1, num_steps=1).steps
    assert [m.tokens for m in step.ranks[0]] == [6, 6]


def test_fewer_samples_than_ranks_leave_empty_micro_batches():
    (step,) = plan([5, 7], max_tokens=100, dp_size=3, num_steps=1).steps
    assert [[m.samples for m in rank] for rank in step.ranks] == [[(1,)], [(0,)], [()]]


def test_a_large_batch_is_planned_quickly():
    lengths = [1 + (i * 7919) % 4096 for i in range(8192)]
    start = time.perf_counter()
    out = plan(lengths, max_tokens=16384, dp_size=64, num_steps=4)
    assert time.perf_counter() - start < 5
    for step in out.steps:
        loads = [sum(m.tokens for m in rank) for rank in step.ranks]
        assert max(loads) < 1.02 * sum(loads) / len(loads)


def test_wrong_arguments_are_named():
    with pytest.raises(DataError, match="1 samples are left to train in 2 optimizer steps"):
        plan([3], max_tokens=8, dp_size=1, num_steps=2)
    with pytest.raises(DataError, match="0 samples are left"):
        plan([], max_tokens=8, dp_size=1, num_steps=1)
    with pytest.raises(DataError, match="sample 1 has 0 tokens"):
        plan([3, 0], max_tokens=8, dp_size=1, num_steps=1)
    with pytest.raises(DataError, match="1 costs for 2 samples"):
        plan([3, 2], max_tokens=8, dp_size=1, num_steps=1, costs=[1.0])
    for name in ("max_tokens", "dp_size", "num_steps", "fixed_micro_batches"):
        good = {"max_tokens": 8, "dp_size": 1, "num_steps": 1, "fixed_micro_batches": 1}
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            plan([3], **{**good, name: 0})


def test_flops_count_the_matrix_products_of_a_decoder():
    shape = ModelShape(
        hidden_size=6,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=20,
    )
    s = 5
    dense = [(6, 8), (6, 4), (6, 4), (8, 6), (6, 10), (6, 10), (10, 6)]
    layer = sum(2 * s * a * b for a, b in dense) + 2 * (2 * s * s * 8) / 2
    assert forward_flops(s, shape) == 2 * layer + 2 * s * 6 * 20
    assert 2 * forward_flops(100, shape) < forward_flops(200, shape)
