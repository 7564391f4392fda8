"""What counts as the same answer: a table of cases, laws that must hold, and hostile texts."""

import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.rollout.rewards.builtin import values
from rlcore.rollout.rewards.builtin.answers import same
from rlcore.rollout.rewards.builtin.text import MAX_CHARS

TABLE = Path(__file__).with_name("math_answers.tsv")
LONGEST_S = 2.0
"""A verdict takes milliseconds; this only tells a bounded one from one that is not."""


def cases() -> list[tuple[str, str, bool]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("# ")]
    return [(answer, label, verdict == "1") for answer, label, verdict in rows]


@pytest.mark.parametrize(("answer", "label", "verdict"), cases())
def test_the_table(answer: str, label: str, verdict: bool) -> None:
    assert same(answer, label) is verdict


def test_the_table_is_large_and_says_no_as_often_as_it_must() -> None:
    rows = cases()
    assert len(rows) > 500
    assert len({(answer, label) for answer, label, _ in rows}) == len(rows)
    assert sum(not verdict for _, _, verdict in rows) > 180


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
integers = st.integers(-(10**40), 10**40)


@quick
@given(integers, integers)
def test_integers_are_compared_exactly(a: int, b: int) -> None:
    assert same(str(a), str(b)) is (a == b)
    assert same(f"{a:,}", str(a))
    assert not same(str(a), str(a + 1))


@quick
@given(integers, st.integers(1, 10**20))
def test_fractions_in_lowest_terms_equal_themselves_in_every_spelling(n: int, d: int) -> None:
    value = Fraction(n, d)
    label = str(value)
    sign = "-" if value < 0 else ""
    assert same(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}", label)
    assert not same(str(value + Fraction(1, 10**30)), label)
    if value.denominator > 1:
        assert not same(f"{value.numerator * 2}/{value.denominator * 2}", label)


@quick
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-1e9, max_value=1e9))
def test_decimals_equal_their_fractions(value: object) -> None:
    text = f"{value:f}"
    assert same(text, str(Fraction(text)))
    assert same(f"{text}000", text)
    assert not same(f"{text}1", text)


@quick
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms())
def test_order_counts_in_tuples_and_not_in_sets(items: list[int], random: object) -> None:
    shuffled = sorted(items)
    for left, right, ordered in (("(", ")", True), (r"\{", r"\}", False), ("", "", False)):
        one, two = (f"{left}{', '.join(map(str, xs))}{right}" for xs in (items, shuffled))
        assert same(one, two) is (items == shuffled if ordered else True)


polynomials = st.lists(st.integers(-9, 9), min_size=1, max_size=5)


def written(coefficients: list[int]) -> str:
    return "+".join(f"({c})x^{{{k}}}" for k, c in enumerate(coefficients))


@quick
@given(polynomials, polynomials, st.integers(-9, 9))
def test_products_of_polynomials_are_multiplied_out(a: list[int], b: list[int], c: int) -> None:
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    label = f"y+{written(product)}"
    assert same(f"y+({written(a)})({written(b)})", label)
    assert same(f"y+({written(a)})({written(b)})+{c}", label) is (c == 0)


@quick
@given(st.integers(1, 400), st.integers(1, 400))
def test_roots_are_added_exactly(a: int, b: int) -> None:
    square = rf"{a + b}+2\sqrt{{{a * b}}}"
    assert same(rf"(\sqrt{{{a}}}+\sqrt{{{b}}})^2+x", f"{square}+x")
    assert not same(rf"(\sqrt{{{a}}}+\sqrt{{{b}}})^2+x", f"{square}+x+\\frac{{1}}{{10^9}}")


@quick
@given(st.text(max_size=60))
def test_any_text_equals_itself_and_never_raises(text: str) -> None:
    assert same(text, text) in (True, False)
    assert same(text, "5") in (True, False)
    assert same("5", text) in (True, False)


ALPHABET = [
    *"12xei+-*/^_()[]{},.=<|! %&",
    *(rf"\{name}" for name in ("frac", "sqrt", "pm", "cup", "log", "pi", "overline", "{", "}")),
    *(r"\text{", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "10"),
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join), st.sampled_from("57x"))
def test_scrambled_latex_takes_bounded_time_and_no_two_labels(text: str, label: str) -> None:
    began = time.process_time()
    verdicts = [same(text, one) for one in ("1009", "7919")]
    assert time.process_time() - began < LONGEST_S
    assert not all(verdicts), "one answer is right for two different numbers"


HOSTILE = {
    "deep brackets": "(" * 5000 + "1" + ")" * 5000,
    "deep brackets within the limit": "(" * 900 + "1" + ")" * 900,
    "deep fractions": r"\frac{1}{" * 180 + "1" + "}" * 180,
    "roots of roots": r"\sqrt" * 390 + "2",
    "fractions without braces": r"\frac" * 390,
    "tower": "9" + "^{9" * 400 + "}" * 400,
    "flat tower": "^".join(["9"] * 900),
    "huge exponent": "9^{999999999999}",
    "huge exponent of a sum": "(x+1)^{999999999}",
    "huge scientific": "1e" + "9" * 1500,
    "many digits": "9" * 1900,
    "powers of many digits": "(" + "9" * 900 + ")^{" + "9" * 900 + "}",
    "factorials": "9" + "!" * 1500,
    "huge factorial": "999999999!",
    "huge binomial": r"\binom{999999999}{499999999}",
    "large root": r"\sqrt{" + "7" * 600 + "}",
    "root of a semiprime": r"\sqrt{1000000016000000063}",
    "root of degree": r"\sqrt[999999]{2}",
    "many terms": "+".join(f"x_{k}" for k in range(330)),
    "product of sums": "(a+b+c+d+e+f+g)" * 100,
    "powers of sums": "(a+b+c+d+f+g)^9" * 60,
    "many equal signs": "=".join("1" * 900),
    "many commas": "," * 1900,
    "long set": r"\{" + ",".join(map(str, range(500))) + r"\}",
    "many plus-minus": r"\pm 1" * 300,
    "many words": r"\text{a}" * 240,
    "many spaces": "5" + " " * 500 + "5",
    "open text": r"\text{" * 300,
    "open boxes": r"\boxed{" * 250,
    "thousands": "1" + ",000" * 400 + "x",
    "thousands that do not end": "1,000" * 390,
    "matrix": r"\begin{pmatrix}" * 130,
    "a megabyte": "1" * 1_000_000,
    "a megabyte of brackets": "(" * 1_000_000,
    "a megabyte of backslashes": "\\" * 1_000_000,
    "zero bytes": "\x00\x01\x02\x03\x04" * 300,
    "lone surrogates": "\ud800" * 300,
    "ligatures": "\ufdfa" * 1900,
    "combining": "a" + "\u0301" * 1900,
    "superscripts": "2" + "⁹" * 1500,
    "vulgar fractions": "½" * 1900,
    "repeating": r"0.\overline{" + "9" * 1800 + "}",
    "units": "5" + " cm/s" * 350,
    "unit powers": "5 cm^{99999999999999}",
    "unions": r"(1,2)\cup" * 220,
    "logarithms": r"\log" * 480,
    "logarithm of a large number": r"\ln " + "7" * 1500,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("length", [None, MAX_CHARS - 1], ids=["whole", "cut"])
def test_hostile_answers_are_wrong_in_bounded_time(name: str, length: int | None) -> None:
    # Cut, it is short enough to be read.
    text = HOSTILE[name][:length]
    began = time.process_time()
    assert not same(text, "5")
    assert not same("5", text)
    assert same(text, text) in (True, False)
    assert time.process_time() - began < LONGEST_S


def test_long_answers_are_compared_as_they_stand() -> None:
    digits = "7" * (MAX_CHARS + 1)
    assert same(digits, digits)
    assert not same(digits, digits[:-1] + "8")
    long = "7" * (MAX_CHARS - 2)
    assert same(long, long + ".0") and not same(long, long[:-1] + "8")


def test_values_are_bounded() -> None:
    for text in ("9^{9^9}+x", "(x+y)^{41}", "x^{2}" * 3):
        assert same(text, text)
    with pytest.raises(values.UnreadableError):
        values.power(values.number(-3), values.number(10**9))
