"""Several files mixed by weights: shares, epochs, and that a cursor says all."""

from collections import Counter
from pathlib import Path

import pytest

from rlcore.config.data import MixedSet
from rlcore.config.tree import DataConfig
from rlcore.data import Cursor, load_dataset, places, plan, span
from rlcore.data.order import Order, shares
from rlcore.errors import DataError


def test_one_file_is_ordered_as_ever() -> None:
    order = Order((7,), (1.0,), 3, True)
    picked, end = order.plan(Cursor(), 30)
    expected, ends = plan(7, 3, True, Cursor(), 30)
    assert (picked, end) == ([position for _, position in expected], ends)
    assert [order.position_at(place) for place in places(Cursor(), 7, 30)] == picked


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.7, 0.2, 0.1), (1e-9, 1.0)])
def test_every_stretch_has_the_shares_that_the_weights_say(weights: tuple[float, ...]) -> None:
    sizes = (5, 50, 11)[: len(weights)]
    order = Order(sizes, weights, 0, True)
    files = [order.file_at(place)[0] for place in places(Cursor(), order.size, 3000)]
    parts = shares(weights)
    assert [part / sum(parts) for part in parts] == pytest.approx(
        [weight / sum(weights) for weight in weights], abs=2e-3
    )
    for start in range(0, 2000, 37):
        for n in (10, 100, 999):
            counts = Counter(files[start : start + n])
            for k, part in enumerate(parts):
                assert abs(counts[k] - n * part / sum(parts)) <= len(parts)


def test_each_file_goes_through_its_own_epochs() -> None:
    order = Order((3, 9), (1.0, 1.0), 4, True)
    picked, _ = order.plan(Cursor(), 36)
    small = [p for p in picked if p < 3]
    large = [p - 3 for p in picked if p >= 3]
    assert len(small) == len(large) == 18
    assert all(sorted(small[k : k + 3]) == [0, 1, 2] for k in range(0, 18, 3))
    assert all(sorted(large[k : k + 9]) == list(range(9)) for k in (0, 9))
    assert len({tuple(small[k : k + 3]) for k in range(0, 18, 3)}) > 1


def test_small_bites_give_the_same_prompts_as_one_large_bite() -> None:
    order = Order((4, 7), (2.0, 1.0), 1, True)
    whole, end = order.plan(Cursor(), 40)
    cursor, bites = Cursor(), []
    for n in (1, 6, 13, 20):
        bite, after = order.plan(cursor, n)
        bites += bite
        cursor = Cursor.after(span(cursor, after))
    assert (bites, cursor) == (whole, end)
    assert whole != Order((4, 7), (2.0, 1.0), 2, True).plan(Cursor(), 40)[0]
    with pytest.raises(DataError, match=r"11 rows so far, but data.path now gives 12"):
        Order((4, 8), (2.0, 1.0), 1, True).plan(cursor, 1)


def test_files_of_a_mix_are_read_by_their_own_keys(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a0", "y": 1}\n{"prompt": "a1", "y": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "b0", "y": 3}\n')
    config = DataConfig(
        path=str(tmp_path / "a.jsonl"),
        label_key="y",
        weight=1.0,
        mix=[MixedSet(path=str(tmp_path / "b.jsonl"), weight=3.0, input_key="question")],
        shuffle=False,
    )
    data = load_dataset(config, lambda: None)
    assert [p.prompt for p in data.prompts] == ["a0", "a1", "b0"]
    assert (data.sizes, data.weights) == ((2, 1), (1.0, 3.0))
    picked, _ = data.order(0, False).plan(Cursor(), 8)
    assert Counter(data.prompts[p].prompt for p in picked) == {"b0": 6, "a0": 1, "a1": 1}
