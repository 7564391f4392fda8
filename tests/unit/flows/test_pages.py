"""The texts and the picture of a run's artifacts."""

import base64
import math
from xml.etree import ElementTree

import pytest

from flows.reporting.chart import MOST_POINTS, Series, line_chart, thinned, ticks
from flows.reporting.pages import Place, curve_page, failure_page, quoted, row, summary_page

PLACE = Place("first", "/data/rl", 10, {"flow run": "http://127.0.0.1:4200/runs/flow-run/1"})
SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_goes_from_corner_to_corner_of_its_axes() -> None:
    chart = line_chart("t", [Series("a", [(0, 0), (5, 0.5), (10, 1)])], "iteration", "reward")
    [line] = ElementTree.fromstring(chart).iter(f"{SVG}polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert points == [(56.0, 336.0), (400.0, 190.0), (744.0, 44.0)]


def test_what_is_no_number_leaves_a_chart_that_can_be_drawn() -> None:
    for points in ([], [(0, math.nan)], [(3, 0.5)]):
        chart = ElementTree.fromstring(line_chart("a < b", [Series("x & y", points)], "i", "r"))
        assert "nan" not in ElementTree.tostring(chart, "unicode")
        marks = sum(math.isfinite(value) for _, value in points)
        assert len(list(chart.iter(f"{SVG}circle"))) == marks


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.13, 0.11, False, [-0.15, -0.1, -0.05, 0, 0.05, 0.1, 0.15]),
        (0, 3, True, [0, 1, 2, 3]),
        (7, 7, True, [7, 8]),
        (2, 2, False, [1.4, 1.6, 1.8, 2, 2.2, 2.4, 2.6]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(
    low: float, high: float, whole: bool, expected: list[float]
) -> None:
    found = ticks(low, high, whole=whole)
    assert found[0] <= low and found[-1] >= high
    assert found == expected


@pytest.mark.parametrize("count", [1, 299, 300, 301, 1000, 5000])
def test_a_long_line_is_thinned_and_keeps_its_level_and_its_end(count: int) -> None:
    points = [(float(n), 0.5) for n in range(count)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert kept[-1] == points[-1]
    assert {value for _, value in kept} == {0.5}


def test_the_picture_of_a_long_run_is_small_and_holds_all_series() -> None:
    history = [
        {"iteration": i, "rollout/raw_reward": 1 - math.exp(-i / 900), "rollout/exact": 0.3}
        | ({"eval/greedy": 0.4, "eval/greedy/pass@1": 0.4} if i % 50 == 0 else {})
        for i in range(5000)
    ]
    page = curve_page(PLACE, history)
    assert len(page) < 60_000
    svg = base64.b64decode(page.partition("base64,")[2].partition(")")[0]).decode()
    assert "mean reward" in svg and "eval greedy" in svg and "pass@1" not in svg


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (" 42\n", "`42 ⏎`"),
        ("a\nb", "`a ⏎ b`"),
        ('<img src="http://x"> **f** [d](e)', '`<img src="http://x"> **f** [d](e)`'),
        ("a `b` c", "``a `b` c``"),
        ("``x", "``` ``x ```"),
        ("a|b", "`a\\|b`"),
        ("a\\|b", "`a\\\u200b\\|b`"),
        ("  ", ""),
        ("x" * 200, f"`{'x' * 159}…`"),
    ],
)
def test_what_a_model_says_is_text_and_no_markup(said: str, shown: str) -> None:
    assert quoted(said) == shown


def test_a_row_has_no_value_for_what_is_missing_or_not_finite() -> None:
    made = row(3, {"seconds": 1.23456, "train/loss": math.nan, "rollout/raw_reward": 1 / 3})
    assert (made["reward"], made["loss"], made["exact"]) == (0.3333, None, None)
    assert (made["iteration"], made["seconds"]) == (3, 1.235)


def test_the_summary_shows_samples_and_where_the_model_is() -> None:
    sample = {"prompt": "1 + 1 =", "response": " 2", "reward": 1.0, "label": 2}
    chat = {"prompt": [{"role": "user", "content": "hi"}], "response": "", "reward": None}
    page = summary_page(
        PLACE, {"iteration": 4, "reward": 0.25}, [sample, chat | {"label": None}], (3, "/m")
    )
    assert "**5 of 10 iterations**" in page and "**0.25**" in page
    assert "| 1 | `1 + 1 =` | `2` | `2` |" in page
    assert "| failed | `hi` |  |  |" in page
    assert "`/m`, made by iteration 3" in page
    assert "sluice samples first --iter 4 --root /data/rl" in page


@pytest.mark.parametrize(
    ("committed", "words"),
    [(0, "No iteration is committed"), (1, "Iteration 0 is"), (4, "Iterations 0 to 3 are")],
)
def test_a_failure_says_what_is_kept_and_what_goes_on(committed: int, words: str) -> None:
    page = failure_page(PLACE, "no such file", committed, deployed=True)
    assert page.startswith(f"# first stopped at iteration {committed}\n\n> `no such file`\n")
    assert words in page and "**Retry**" in page and "sluice resume first --root /data/rl" in page
    assert "Retry**" not in failure_page(PLACE, "no", committed, deployed=False)
