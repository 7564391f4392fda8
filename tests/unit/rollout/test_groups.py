"""Groups of any sizes: taken apart, put together, numbered and seeded, nothing is lost or twice."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data import Prompt
from rlcore.rollout.buffer import Group, in_order, number
from rlcore.rollout.groups import split_groups
from rlcore.rollout.supply import make_groups, set_seeds
from rlcore.sample import Sample, Status

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
