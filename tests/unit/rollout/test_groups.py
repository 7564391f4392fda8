"""Groups of any sizes: taken apart, put together, numbered and seeded, nothing is lost or twice."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data import Prompt
from rlcore.rollout.buffer import Group, in_order, number
from rlcore.rollout.groups import (
    execution_rewards,
    identity_of,
    join_execution,
    response_lengths,
    split_executions,
    split_groups,
)
from rlcore.rollout.supply import make_groups, set_seeds
from rlcore.sample import Sample, Status
from rlcore.store.batch import samples_to_table, table_to_samples

quick = settings(deadline=None, derandomize=True, max_examples=60)
PROMPTS = st.lists(st.integers(0, 5), min_size=1, max_size=10)
"""Ids of prompts, some twice, as at the end of an epoch."""


def prompts_of(ids: list[int]) -> list[Prompt]:
    return [Prompt(f"p{k}", k, f"{k}=", tokens=[k + 1]) for k in ids]


@quick
@given(PROMPTS, st.integers(1, 5), st.integers(0, 2**31 - 1))
def test_groups_are_whole_adjacent_and_each_sample_has_its_own_seed(
    ids: list[int], n: int, seed: int
) -> None:
    samples = make_groups(prompts_of(ids), n, seed, "rollout-0")
    groups = split_groups(samples)
    assert [sample for group in groups for sample in group] == samples
    assert [len(group) for group in groups] == [n] * len(ids)
    assert [group[0].prompt_id for group in groups] == [f"p{k}" for k in ids]
    assert all(len({s.prompt_id for s in group}) == 1 for group in groups)
    assert [s.index for s in samples] == list(range(len(ids) * n))
    assert [s.group_index for s in samples] == [k for k in range(len(ids)) for _ in range(n)]
    assert len({s.seed for s in samples}) == len(samples)
    again = make_groups(prompts_of(ids), n, seed, "rollout-0")
    assert [s.seed for s in again] == [s.seed for s in samples]
    other = make_groups(prompts_of(ids), n, seed, "rollout-1")
    assert not {s.seed for s in other} & {s.seed for s in samples}


@quick
@given(PROMPTS, st.integers(1, 4), st.data())
def test_seeds_depend_on_the_batch_and_not_on_how_it_was_asked_for(
    ids: list[int], n: int, data: st.DataObject
) -> None:
    """Refills ask in several goes; what was begun before keeps its seed."""
    cut = data.draw(st.integers(0, len(ids)))
    at_once = make_groups(prompts_of(ids), n, 3, "rollout-0")
    seen: dict[str, int] = {}
    parts = []
    for part in (ids[:cut], ids[cut:]):
        groups = [
            Group((0, k), [p.sample() for _ in range(n)]) for k, p in enumerate(prompts_of(part))
        ]
        set_seeds(groups, 3, "rollout-0", seen)
        parts += groups
    assert [s.seed for group in parts for s in group.samples] == [s.seed for s in at_once]
    begun = [s.seed for s in parts[0].samples]
    for sample in parts[0].samples:
        sample.status = Status.ABORTED
    set_seeds(parts, 99, "rollout-7")
    assert [s.seed for s in parts[0].samples] == begun


@quick
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), unique=True, max_size=12),
    st.randoms(),
)
def test_the_order_of_the_plan_is_found_again_from_any_order(
    places: list[tuple[int, int]], random: object
) -> None:
    groups = [Group(place, [Sample(prompt_id=str(place))] * 1) for place in places]
    shuffled = list(groups)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ordered = in_order(shuffled)
    assert [group.place for group in ordered] == sorted(places)
    samples = number(ordered, (3, 5))
    assert [s.group_index for s in samples] == list(range(3, 3 + len(places)))
    assert [s.index for s in samples] == list(range(5, 5 + len(places)))


FANNED = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=6)
"""By group, how many samples each execution made."""


def fanned(sizes: list[list[int]]) -> list[Group]:
    """Groups as they are when generated: each numbered for itself, as those of a buffer are."""
    groups = []
    for k, executions in enumerate(sizes):
        samples: list[Sample] = []
        for size in executions:
            origin = Sample(group_index=k, index=len(samples), prompt_id=f"p{k}", seed=len(samples))
            made = [Sample(response_length=n + 1, tokens=[1] * (n + 1)) for n in range(size)]
            join_execution(made, identity_of(origin))
            samples += made
        groups.append(Group((0, k), samples))
    return groups


@quick
@given(FANNED, st.integers(0, 9), st.integers(0, 99))
def test_executions_stay_together_however_often_they_are_numbered_and_stored(
    sizes: list[list[int]], groups_before: int, samples_before: int
) -> None:
    groups = fanned(sizes)
    for before in ((0, 0), (groups_before, samples_before)):
        samples = number(groups, before)
        assert samples == [sample for group in groups for sample in group.samples]
        assert [s.index for s in samples] == [before[1] + k for k in range(len(samples))]
        found = [split_executions(group) for group in split_groups(samples)]
        assert [[len(e) for e in executions] for executions in found] == sizes
        for execution in (e for executions in found for e in executions):
            first = execution[0].index if len(execution) > 1 else None
            assert {s.rollout_id for s in execution} == {first}
            assert len({(s.group_index, s.prompt_id, s.seed) for s in execution}) == 1
        assert table_to_samples(samples_to_table(samples)) == samples
    assert response_lengths(samples) == [n * (n + 1) // 2 for part in sizes for n in part]


@quick
@given(FANNED, st.data())
def test_the_reward_of_an_execution_is_the_mean_of_its_samples(
    sizes: list[list[int]], data: st.DataObject
) -> None:
    samples = number(fanned(sizes))
    one = st.none() | st.sampled_from([0.0, 0.1, 1.0])
    rewards = data.draw(st.lists(one, min_size=len(samples), max_size=len(samples)))
    rest, wanted = iter(rewards), []
    for n in (size for executions in sizes for size in executions):
        part = [r for r in (next(rest) for _ in range(n)) if r is not None]
        wanted.append(sum(part) / len(part) if part else None)
    found = execution_rewards(samples, rewards)
    assert [len(group) for group in found] == [len(group) for group in sizes]
    for ours, theirs in zip((r for group in found for r in group), wanted, strict=True):
        assert ours == theirs or abs((ours or 0) - (theirs or 0)) < 1e-15
    # Exactly, where all are equal: 0.1 three times has another mean.
    alike = execution_rewards(samples, [0.1] * len(samples))
    assert {r for group in alike for r in group} == {0.1}


@quick
@given(FANNED, st.integers(0, 2**31 - 1))
def test_seeds_are_those_of_executions(sizes: list[list[int]], seed: int) -> None:
    groups = fanned(sizes)
    alone = [
        Group((0, k), [Sample(prompt_id=f"p{k}") for _ in executions])
        for k, executions in enumerate(sizes)
    ]
    set_seeds(alone, seed, "rollout-0")
    for group in groups:
        for sample in group.samples:
            if sample.rollout_id is not None:
                sample.status = Status.COMPLETED
    set_seeds(groups, seed, "rollout-0")
    for group, plain in zip(groups, alone, strict=True):
        executions = split_executions(group.samples)
        for execution, one in zip(executions, plain.samples, strict=True):
            if len(execution) == 1:
                assert execution[0].seed == one.seed
