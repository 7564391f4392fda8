"""The built-in scorers over any label and response: they tell right from wrong or say that nothing
can be right, and never raise anything else or take long.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.rollout.args import PluginArgs
from rlcore.rollout.rewards import builtin
from rlcore.rollout.rewards.protocol import NoRewardError
from rlcore.sample import Sample, Status

quick = settings(deadline=None, derandomize=True, max_examples=60)
ARGS = PluginArgs({})
LONGEST_S = 1.0
PLAIN = ("math", "deepscaler", "dapo", "f1", "gpqa", "random")
TYPES = (*PLAIN, *(f"boxed_{name}" for name in PLAIN))


def score(rm_type: str, response: str, label: Any, **metadata: Any) -> float:
    sample = Sample(
        index=0,
        prompt_id="p",
        response=response,
        label=label,
        metadata=metadata,
        seed=7,
        status=Status.COMPLETED,
    )
    answer = builtin.load(rm_type)(ARGS, sample)
    key = builtin.find(rm_type).key
    return float(answer[key] if key else answer)


INTEGERS = st.integers(-(10**30), 10**30)
NUMBERS = (
    INTEGERS.map(str)
    | st.fractions(max_denominator=10**9).map(str)
    | st.decimals(
        allow_nan=False, allow_infinity=False, places=4, min_value=-1e9, max_value=1e9
    ).map(lambda one: f"{one:f}")
    | st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(
        lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"
    )
    | st.integers(0, 10**6).map(lambda n: rf"\sqrt{{{n}}}")
)
ANSWERS = (
    NUMBERS
    | st.lists(NUMBERS, min_size=2, max_size=4).map(lambda items: f"({', '.join(items)})")
    | st.lists(NUMBERS, min_size=2, max_size=4).map(lambda items: rf"\{{{', '.join(items)}\}}")
    | st.text("abcxyz", min_size=1, max_size=8)
)
TYPED: dict[str, Callable[[str], str]] = {
    "math": lambda answer: rf"So it is \boxed{{{answer}}}.",
    "boxed_math": lambda answer: rf"So it is \boxed{{{answer}}}.",
    "deepscaler": lambda answer: rf"<think>\boxed{{5}}?</think> It is \boxed{{{answer}}}.",
    "dapo": lambda answer: f"Answer: 5\nNo.\nAnswer: {answer}",
    "f1": lambda answer: answer,
}


@pytest.mark.parametrize("rm_type", TYPED)
@quick
@given(ANSWERS)
def test_a_label_is_its_own_right_answer(rm_type: str, answer: str) -> None:
    assert score(rm_type, TYPED[rm_type](answer), answer) == 1.0


@quick
@given(st.sampled_from("ABCDEFGH"), st.sampled_from(["Answer: {}", "The answer is ({}).", "{}"]))
def test_a_choice_is_its_own_right_answer_and_no_other_is(letter: str, form: str) -> None:
    for picked in "ABCDEFGH":
        assert score("gpqa", form.format(picked), letter) == float(picked == letter)


@quick
@given(INTEGERS, INTEGERS)
def test_another_number_is_wrong(right: int, other: int) -> None:
    for rm_type in ("math", "deepscaler", "dapo"):
        got = score(rm_type, TYPED[rm_type](str(other)), right)
        assert (got == 1.0) == (right == other)


PIECES = [
    *"0123456789xyABCD()[]{}^_+-*/=.,%$ \n",
    r"\boxed{", r"\frac{", r"\sqrt{", r"\text{", "}", r"\left(", r"\right)", r"\cdot", r"\pi",
    "<think>", "</think>", "Answer:", "The answer is ", "1e999", "9" * 40,
    "\u2212", "\u00bd", "\U0001d7d9",
]  # fmt: skip
RESPONSES = st.lists(st.sampled_from(PIECES), max_size=60).map("".join) | st.text(max_size=40)
LABELS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
    | st.lists(st.text(max_size=4) | st.integers(), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)
)


@settings(quick, max_examples=120)
@given(st.sampled_from(TYPES), RESPONSES, LABELS)
def test_any_response_and_label_give_a_number_or_no_reward_in_bounded_time(
    rm_type: str, response: str, label: Any
) -> None:
    began = time.process_time()
    try:
        got = score(rm_type, response, label)
    except NoRewardError as error:
        assert str(error)
    else:
        assert math.isfinite(got) and -1.0 <= got <= 1.0
    assert time.process_time() - began < LONGEST_S


@quick
@given(RESPONSES, st.integers(0, 7))
def test_the_same_sample_has_the_same_score(response: str, label: int) -> None:
    for rm_type in TYPES:
        assert score(rm_type, response, label) == score(rm_type, response, label)
