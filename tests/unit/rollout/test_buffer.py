"""What a rollout leaves and how the next goes on: no prompt lost or twice, no token changed."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.config.tree import RolloutConfig
from rlcore.data import Cursor, Place, places, plan, position_at, span
from rlcore.errors import Corrupt
from rlcore.rollout.buffer import (
    Group,
    go_on,
    in_order,
    leave,
    line_up,
    number,
    read_buffer,
    write_buffer,
)
from rlcore.rollout.supply import set_seeds
from rlcore.sample import Sample, Status
from rlcore.store.objects import Objects
from rlcore.store.paths import buffer_prefix


def config(
    want: int = 2, begun: int | None = 4, partial: bool = True, **more: Any
) -> RolloutConfig:
    fields = {"rollout_batch_size": want, "over_sampling_batch_size": begun}
    fields |= {"partial_rollout": partial, "n_samples_per_prompt": 2} | more
    return RolloutConfig(**fields)


def sample(status: Status, length: int = 0, version: str = "3", **more: Any) -> Sample:
    made = Sample(prompt_id="p", prompt="7=", tokens=[7, 8] + [5] * length, response_length=length)
    made.status = status
    if length:
        made.response = "5" * length
        made.rollout_log_probs = [-0.25] * length
        made.weight_versions = [version]
    return replace(made, **more)


def group(place: Place, *samples: Sample) -> Group:
    return Group(place, list(samples))


def whole(place: Place) -> Group:
    return group(place, sample(Status.COMPLETED, 3), sample(Status.TRUNCATED, 4))


def cut(place: Place) -> Group:
    return group(place, sample(Status.COMPLETED, 3), sample(Status.ABORTED, 1))


def untouched(place: Place) -> Group:
    return group(place, sample(Status.ABORTED), sample(Status.PENDING))


def anew(place: Place) -> list[Sample]:
    return [sample(Status.PENDING, label=place[1]) for _ in range(2)]


def test_what_was_begun_is_kept_as_it_is_and_marked_with_the_iteration() -> None:
    groups = [whole((0, 1)), cut((0, 2)), untouched((0, 3))]
    before = copy.deepcopy(groups)
    left = leave(groups, 7, config(), anew)
    assert [g.place for g in left.groups] == [(0, 1), (0, 2), (0, 3)]
    for kept, old in zip(left.groups[:2], before[:2], strict=True):
        for new, was in zip(kept.samples, old.samples, strict=True):
            assert new == replace(was, metadata={"start_rollout_id": 7})
    assert [s.status for s in left.groups[2].samples] == [Status.PENDING] * 2
    assert left.metrics == {
        "rollout/buffer/groups": 3,
        "rollout/buffer/whole_groups": 1,
        "rollout/buffer/kept_samples": 4,
        "rollout/buffer/kept_tokens": 11,
        "rollout/buffer/dropped_samples": 0,
        "rollout/buffer/dropped_tokens": 0,
    }
    again = leave(left.groups, 8, config(), anew)
    assert again.groups == left.groups


def test_without_partial_rollout_prompts_come_again_and_what_is_given_up_is_counted() -> None:
    left = leave([whole((0, 1)), cut((0, 2))], 7, config(partial=False), anew)
    assert [(g.place, g.samples) for g in left.groups] == [
        ((0, 1), anew((0, 1))),
        ((0, 2), anew((0, 2))),
    ]
    assert left.metrics["rollout/buffer/dropped_samples"] == 4
    assert left.metrics["rollout/buffer/dropped_tokens"] == 11
    assert left.metrics["rollout/buffer/kept_samples"] == 0


def test_tokens_of_older_policies_are_masked_if_asked() -> None:
    masked = config(mask_offpolicy_in_partial_rollout=True)
    left = leave([whole((0, 1)), cut((0, 2))], 7, masked, anew)
    assert left.groups[0].samples == anew((0, 1))
    assert left.metrics["rollout/buffer/dropped_tokens"] == 7
    [_, resumed] = go_on(left.groups, "4", masked, anew)
    assert [s.loss_mask for s in resumed.samples] == [[0, 0, 0], [0]]
    [same] = go_on([cut((0, 2))], "3", masked, anew)
    assert [s.loss_mask for s in same.samples] == [None, None]
    [kept] = go_on([cut((0, 2))], "4", config(), anew)
    assert [s.loss_mask for s in kept.samples] == [None, None]


def test_a_group_of_another_size_is_begun_anew(caplog: pytest.LogCaptureFixture) -> None:
    [made] = go_on([group((1, 5), sample(Status.COMPLETED, 3))], "4", config(), anew)
    assert made.samples == anew((1, 5))
    assert "n_samples_per_prompt = 2: it is begun anew, and 3 tokens are given up" in caplog.text


def test_the_buffer_comes_first_then_new_prompts() -> None:
    line = line_up([cut((0, 1)), whole((0, 2))], config(want=2, begun=5))
    assert ([g.place for g in line.groups], line.new, line.waiting) == ([(0, 1), (0, 2)], 3, [])
    # A fork may over-sample less than its parent did.
    line = line_up([cut((0, k)) for k in range(5)], config(want=2, begun=None, partial=False))
    assert ([g.place[1] for g in line.groups], line.new) == ([0, 1], 0)
    assert [g.place[1] for g in line.waiting] == [2, 3, 4]


def test_where_enough_is_whole_nothing_else_is_begun() -> None:
    buffer = [cut((0, 1)), whole((0, 2)), untouched((0, 3)), whole((0, 4)), whole((0, 5))]
    line = line_up(buffer, config(want=2, begun=9))
    assert ([g.place[1] for g in line.groups], line.new) == ([2, 4], 0)
    assert [g.place[1] for g in line.waiting] == [1, 3, 5]


def test_a_sample_that_was_begun_keeps_its_seed() -> None:
    groups = [group((0, 1), sample(Status.ABORTED, 2, seed=5), sample(Status.PENDING, seed=6))]
    groups += [group((1, 0), sample(Status.PENDING), sample(Status.PENDING))]
    set_seeds(groups, 0, "rollout-1")
    seeds = [s.seed for g in groups for s in g.samples]
    assert seeds[0] == 5 and seeds[1] != 6 and len(set(seeds)) == 4


def test_a_buffer_comes_back_as_it_was(tmp_path: Any) -> None:
    objects = Objects.open(str(tmp_path))
    groups = [
        group((0, 9), sample(Status.COMPLETED, 3, reward={"score": 1.0}), sample(Status.FAILED)),
        group(
            (1, 0),
            sample(
                Status.ABORTED,
                4,
                loss_mask=[1, 0, 0, 1],
                rollout_log_probs=[-0.5, 0.0, 0.0, -1.25],
                weight_versions=["2", "3"],
                seed=11,
                label={"answer": [1, None]},
                metadata={"start_rollout_id": 2, "tools": [{"name": "x"}]},
                prefix_cache_info={"cached_tokens": 1, "total_prompt_tokens": 2},
                train_metadata={"a": 1},
                non_generation_time=0.5,
            ),
            sample(Status.PENDING),
        ),
    ]
    expected = copy.deepcopy(groups)
    number(expected)
    record = write_buffer(objects, buffer_prefix("r", 0, "a"), groups)
    assert record["places"] == [[0, 9], [1, 0]]
    assert read_buffer(objects, record) == expected
    assert read_buffer(objects, None) == []
    with pytest.raises(Corrupt, match="holds 2 groups, but its manifest names places of 1"):
        read_buffer(objects, record | {"places": [[0, 9]]})


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9),
    steps=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 5), st.booleans(), st.randoms()),
        min_size=1,
        max_size=8,
    ),
)
def test_every_prompt_is_used_once_or_in_the_buffer(
    size: int, steps: list[tuple[int, int, bool, Any]]
) -> None:
    """Whatever the sizes, and even where they change, as they may from a run to its fork."""
    cursor: dict[str, int] | None = None
    buffer: list[Group] = []
    used: list[Place] = []
    passed = 0
    for i, (want, more, partial, random) in enumerate(steps):
        own = config(want, want + more, partial and more > 0)
        line = line_up(buffer, own)
        start = Cursor.after(cursor)
        picked, end = plan(size, 3, True, start, line.new)
        new = places(start, size, line.new)
        assert [position_at(size, 3, True, place) for place in new] == [p for _, p in picked]
        groups = [*line.groups, *(Group(place, anew(place)) for place in new)]
        assert groups == in_order(groups) and len(groups) >= want
        for one in groups:
            for member in one.samples:
                if member.status in (Status.PENDING, Status.ABORTED):
                    status = random.choice([Status.COMPLETED, Status.ABORTED])
                    member.status = status
                    member.response_length += 1
                    member.tokens = [*member.tokens, 1]
        taken = set(random.sample(range(len(groups)), want))
        used += [g.place for k, g in enumerate(groups) if k in taken]
        rest = [g for k, g in enumerate(groups) if k not in taken]
        buffer = leave(in_order([*rest, *line.waiting]), i, own, anew).groups
        cursor = span(start, end)
        passed += line.new
        everything = sorted([*used, *(g.place for g in buffer)])
        assert everything == places(Cursor(), size, passed)
