"""The plan of prompts: every row once an epoch, reproducible, over any number of wraps."""

import pytest

from rlcore.data import Cursor, plan, span
from rlcore.data.source import permutation
from rlcore.errors import DataError


def test_an_epoch_visits_every_row_once_in_a_seeded_order() -> None:
    picked, end = plan(100, 3, True, Cursor(), 100)
    assert sorted(p for _, p in picked) == list(range(100))
    assert [p for _, p in picked] != list(range(100))
    assert end == Cursor(1, 0, 100)
    assert picked == plan(100, 3, True, Cursor(), 100)[0]
    assert picked != plan(100, 4, True, Cursor(), 100)[0]
    assert [p for _, p in plan(100, 3, True, end, 100)[0]] != [p for _, p in picked]


def test_the_order_is_pinned_so_that_no_library_update_changes_a_run() -> None:
    assert permutation(8, 0, 0).tolist() == [7, 3, 5, 1, 4, 0, 6, 2]


def test_small_bites_give_the_same_prompts_as_one_large_bite() -> None:
    whole, end = plan(7, 1, True, Cursor(), 40)
    cursor, bites = Cursor(), []
    for n in (1, 6, 13, 20):
        bite, after = plan(7, 1, True, cursor, n)
        bites += bite
        cursor = Cursor.after(span(cursor, after))
    assert bites == whole
    assert cursor == end == Cursor(5, 5, 7)


def test_without_shuffling_the_order_is_the_file_order() -> None:
    assert plan(3, 0, False, Cursor(0, 1, 3), 4)[0] == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_a_long_plan_is_quick_and_balanced() -> None:
    picked, _ = plan(1_000_000, 5, True, Cursor(2, 999_999, 1_000_000), 3)
    assert [e for e, _ in picked] == [2, 3, 3]


def test_first_places_are_spread_evenly_over_epochs() -> None:
    firsts = [int(permutation(10, 0, e)[0]) for e in range(2000)]
    assert all(140 < firsts.count(k) < 260 for k in range(10))


def test_a_data_set_that_changed_its_size_is_refused() -> None:
    with pytest.raises(DataError, match=r"100 rows so far, but data.path now gives 99"):
        plan(99, 0, True, Cursor(0, 5, 100), 4)
    with pytest.raises(DataError, match="no rows"):
        plan(0, 0, True, Cursor(), 4)


def test_the_manifest_cursor_says_both_ends() -> None:
    assert span(Cursor(), Cursor(1, 2, 9)) == {
        "epoch": 0, "offset": 0, "next_epoch": 1, "next_offset": 2, "size": 9,
    }  # fmt: skip
    assert Cursor.after(None) == Cursor()
