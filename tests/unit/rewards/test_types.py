"""The built-in types: what each takes for the answer, and what it says when it cannot tell."""

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import PluginError
from rlcore.rollout.args import PluginArgs
from rlcore.rollout.rewards import builtin
from rlcore.rollout.rewards.builtin.choices import picked_letter
from rlcore.rollout.rewards.builtin.extract import after_thinking, labels_of, last_box
from rlcore.rollout.rewards.builtin.texts import token_f1
from rlcore.rollout.rewards.protocol import NoRewardError
from rlcore.sample import Sample, Status

REPO = Path(__file__).parents[3]
needs_math_verify = pytest.mark.skipif(
    find_spec("math_verify") is None, reason="math-verify is not installed"
)
ARGS = PluginArgs({})


def score(rm_type: str, response: str, label: Any = None, **metadata: Any) -> Any:
    sample = Sample(
        index=0,
        prompt_id="p",
        response=response,
        label=label,
        metadata=metadata,
        seed=7,
        status=Status.COMPLETED,
    )
    return builtin.load(rm_type)(ARGS, sample)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{4} no, \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right\}}", r"\left\{ x \right\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5", "5"),
        (r"$\boxed 5$", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{4} \fbox{5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x=\boxed{5}}", "x=5"),
        (r"{ \boxed{5}", "5"),
        (r"} \boxed{5} {", "5"),
        (r"\boxed{5", None),
        (r"\boxed{4} \boxed{5", None),
        (r"\boxed{4 ... \boxed{5}", "5"),
        (r"\boxed{}", ""),
        ("5", None),
        ("", None),
        (r"\\boxed{5}", None),
        (r"\boxed{a} \boxed{ b }", " b "),
    ],
)  # fmt: skip
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 150_000, "\\boxed{}" * 130_000, "{" * 1_000_000, "\\" * 1_000_000]
)
def test_boxes_are_found_in_linear_time(text: str) -> None:
    began = time.process_time()
    last_box(text)
    assert time.process_time() - began < 3


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="a{}\\ 1", max_size=20), st.text(alphabet="xyz123+-", max_size=10))
def test_what_is_boxed_last_is_found_behind_any_text(before: str, inside: str) -> None:
    assert last_box(f"{before} \n\\boxed{{{inside}}} done") == inside or before.endswith("\\")


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{5}", "5", 1.0),
        (r"\boxed{5}", 5, 1.0),
        (r"\boxed{5}", 5.0, 1.0),
        (r"\boxed{0}", 0, 1.0),
        (r"\boxed{0}", "0", 1.0),
        (r"\boxed{0}", 0.0, 1.0),
        (r"\boxed{1}", 0, 0.0),
        (r"\boxed{0.1}", 0.1, 1.0),
        (r"\boxed{10^{22}}", 1e22, 1.0),
        (r"\boxed{9007199254740993}", 9007199254740993, 1.0),
        (r"\boxed{9007199254740992}", 9007199254740993, 0.0),
        (r"\boxed{-5}", -5, 1.0),
        (r"\boxed{True}", True, 1.0),
        (r"\boxed{1}", True, 0.0),
        (r"\boxed{5}", r"\boxed{5}", 1.0),
        (r"\boxed{5}", r"The answer is $\boxed{5}$.", 1.0),
        (r"\boxed{5}", ["4", "5"], 1.0),
        (r"\boxed{6}", ["4", 5], 0.0),
        (r"\boxed{5} or \boxed{6}", "5", 0.0),
        (r"\boxed{5, 6}", "5", 0.0),
        ("5", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{}", "5", 0.0),
        (r"\boxed{5", "5", 0.0),
    ],
)
def test_math(response: str, label: Any, reward: float) -> None:
    assert score("math", response, label) == reward


@pytest.mark.parametrize(
    "rm_type",
    ["math", "deepscaler", "dapo", "f1", pytest.param("math_verify", marks=needs_math_verify)],
)
@pytest.mark.parametrize("label", [None, "", "  ", [], [""], {"a": 1}])
def test_no_label_is_no_verdict(rm_type: str, label: Any) -> None:
    with pytest.raises(NoRewardError, match="label"):
        score(rm_type, r"\boxed{5}", label)


def test_labels_of_arrays() -> None:
    import numpy as np

    assert labels_of(np.array(["1", "2"])) == ["1", "2"]
    assert labels_of(np.int64(0)) == ["0"]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<think>\boxed{4}</think> \boxed{5}", 1.0),
        (r"<think>\boxed{5}</think> so it is", 0.0),
        (r"<think>a</think> \boxed{4} <think>b</think> \boxed{5}", 1.0),
        (r"<think>\boxed{5}", 0.0),
        (r"\boxed{5}", 0.0),
        (r"###Response \boxed{5}", 1.0),
        (r"\boxed{5} ###Response 5", 0.0),
    ],
)
def test_deepscaler_reads_what_follows_the_thinking(response: str, reward: float) -> None:
    assert score("deepscaler", response, "5") == reward


def test_after_thinking() -> None:
    assert after_thinking("a</think>b</think>c") == "c"
    assert after_thinking("a###Responseb###Responsec") == "b"
    assert after_thinking("a") is None


@pytest.mark.parametrize(
    ("response", "label", "right", "pred"),
    [
        ("Answer: 34", "34", True, "34"),
        ("answer: 34.", 34, True, "34"),
        ("**Answer:** 34", "34", True, "34"),
        ("Answer: $34$", "34", True, "$34$"),
        (r"Answer: $\boxed{34}$", "34", True, "34"),
        ("Answer: 3\nAnswer: 34", "34", True, "34"),
        ("Answer: 34\nAnswer: 3", "34", False, "3"),
        ("Answer:34<|im_end|>", "34", True, "34"),
        ("Answer: 34\nand more", "34", True, "34"),
        ("Answer: 0", 0, True, "0"),
        ("Answer: x = 34", "34", True, "x = 34"),
        ("Answer: 1,234", "1234", True, "1,234"),
        ("Answer: 9007199254740992", "9007199254740993", False, "9007199254740992"),
        ("Answer: 9007199254740993", "9007199254740993", True, "9007199254740993"),
        ("Answer: 34" + " " * 300, "34", False, "[INVALID]"),
        ("The answer is 34", "34", False, "[INVALID]"),
        (r"\boxed{34}", "34", False, "[INVALID]"),
        ("Answer: 17*2", "34", False, "17*2"),
        ("", "34", False, "[INVALID]"),
    ],
)
def test_dapo(response: str, label: Any, right: bool, pred: str) -> None:
    found = score("dapo", response, label)
    assert found == {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{5}", "5", 1.0),
        (r"<think> \boxed{5}", "5", 1.0),
        (r"5", "5", 0.0),
        (r"\boxed{6}", "5", 0.0),
    ],
)
def test_the_prefix_scores_what_is_boxed(response: str, label: str, reward: float) -> None:
    assert score("boxed_math", response, label) == reward
    assert score("boxed_deepscaler", response, label) == reward
    assert score("boxed_dapo", response, label)["score"] == 2 * reward - 1
    assert score("boxed_f1", response, label) == reward


@pytest.mark.parametrize(
    ("response", "label", "f1"),
    [
        ("Paris", "paris", 1.0),
        ("The Paris.", "paris", 1.0),
        ("in Paris", "Paris", 2 / 3),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("yes", "yes", 1.0),
        ("yes it is", "yes", 0.0),
        ("no", "yes", 0.0),
        ("a the", "the", 1.0),
        ("a b b", "b b c", 0.8),
        ("«Paris»", "Paris", 1.0),
        ("cafe\u0301", "café", 1.0),
    ],
)
def test_f1(response: str, label: str, f1: float) -> None:
    assert token_f1(response, label) == pytest.approx(f1)


def test_f1_takes_the_best_label_and_numbers() -> None:
    assert score("f1", "Paris", ["London", "Paris"]) == 1.0
    assert score("f1", "0", 0) == 1.0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_symmetric_and_between_0_and_1(a: str, b: str) -> None:
    assert 0 <= token_f1(a, b) <= 1
    assert token_f1(a, b) == pytest.approx(token_f1(b, a))
    assert token_f1(a, a) == 1.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is B", "B"),
        ("The answer is (B).", "B"),
        ("Answer: B", "B"),
        ("**Answer: B**", "B"),
        ("answer is **B**", "B"),
        ("The correct option is C because", "C"),
        ("B is correct", "B"),
        ("(C) is the correct choice", "C"),
        ("The answer is not A. The answer is B.", "B"),
        ("The answer is A. Wait, the final answer is B.", "B"),
        ("The answer is a prime number, so (D)", "D"),
        ("I think that B", "B"),
        (r"so \boxed{C}", "C"),
        (r"so \boxed{\text{(C)}}", "C"),
        ("The final answer is $\\boxed{D}$.", "D"),
        ("A good try", None),
        ("The answer is E", None),
        ("", None),
        ("D", "D"),
        ("the answer is b.", "B"),
        ("Answer B: it is", "B"),
    ],
)
def test_the_letter_that_is_picked(response: str, letter: str | None) -> None:
    assert picked_letter(response, "ABCD") == letter


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("Answer: B", "B", {}, 1.0),
        ("Answer: B", "(B)", {}, 1.0),
        ("Answer: B", "b", {}, 1.0),
        ("Answer: A", "B", {}, 0.0),
        ("Answer: A", 0, {"choices": ["x", "y"]}, 1.0),
        ("Answer: B", 0, {"choices": ["x", "y"]}, 0.0),
        ("Answer: B", 1, {"choices": ["x", "y"]}, 1.0),
        ("Answer: A", None, {"correct_letter": "A"}, 1.0),
        ("Answer: B", "red wine", {"choices": ["white wine", "red wine"]}, 1.0),
        ("It is red wine", "red wine", {"choices": ["white wine", "red wine"]}, 1.0),
        ("It is 15", "5", {"choices": ["15", "5"]}, 0.0),
        ("It is 5", "5", {"choices": ["15", "5"]}, 1.0),
        ("<think>Answer: A</think> Answer: B", "B", {}, 1.0),
        ("Answer: F", "F", {"valid_letters": ["E", "F"]}, 1.0),
    ],
)
def test_gpqa(response: str, label: Any, metadata: dict[str, Any], reward: float) -> None:
    assert score("gpqa", response, label, **metadata) == reward


def test_gpqa_without_a_right_choice_is_no_verdict() -> None:
    for label in (None, 7, "C"):
        with pytest.raises(NoRewardError):
            score("gpqa", "Answer: A", label, choices=["x", "y"])


def test_random_is_the_same_for_the_same_sample() -> None:
    draws = [score("random", f"r{k}") for k in range(200)]
    assert draws == [score("random", f"r{k}") for k in range(200)]
    assert 60 < sum(draws) < 140 and set(draws) == {0.0, 1.0}


def test_unknown_types_name_the_nearest() -> None:
    with pytest.raises(PluginError, match="did you mean 'deepscaler'"):
        builtin.load("deepscalar")
    with pytest.raises(PluginError, match="there are math, "):
        builtin.load("boxed_")


@needs_math_verify
def test_math_verify_agrees_where_it_is_meant_to() -> None:
    assert score("math_verify", r"so \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert score("math_verify", r"so \boxed{\frac{1}{3}}", "0.5") == 0.0
    assert score("math_verify", r"\boxed{0}", 0) == 1.0
    assert score("boxed_math_verify", r"so \boxed{5}", "5") == 1.0
    assert score("boxed_math_verify", "5", "5") == 0.0


def python(code: str, path: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([path, str(REPO)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("rm_type", "said"),
    [("math_verify", "pip install 'math-verify"), ("ifbench", "PYTHONPATH")],
)
def test_what_is_not_installed_is_told(rm_type: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math_verify here')")
    code = f"from rlcore.rollout.rewards import builtin; builtin.load({rm_type!r})"
    out = python(code, str(tmp_path))
    assert "PluginError" in out and said in out


IFBENCH = """
import dataclasses
@dataclasses.dataclass
class InputExample:
    key: int; instruction_id_list: list; prompt: str; kwargs: list
class Output:
    def __init__(self, ok): self.follow_all_instructions = ok
def test_instruction_following_strict(case, responses):
    assert case.kwargs == [{"n": 2}, {}] and case.key == 3 and case.prompt == "text"
    return Output(responses[case.prompt] == "good")
"""


def test_ifbench_is_called_as_it_is_made(tmp_path: Path) -> None:
    # IFBench is a repository that is not installed here; this has its two names.
    (tmp_path / "evaluation_lib.py").write_text(IFBENCH)
    code = (
        "from rlcore.rollout.rewards import builtin\n"
        "from rlcore.sample import Sample\n"
        "more = dict(instruction_id_list=['a', 'b'], kwargs=[{'n': 2, 'm': None}, None],\n"
        "            prompt_text='text', record_id=3)\n"
        "f = builtin.load('ifbench')\n"
        "print([f(None, Sample(prompt='p', response=r, metadata=more)) for r in ('good', 'bad')])"
    )
    assert python(code, str(tmp_path)) == "[1.0, 0.0]\n"
    code = (
        "from rlcore.rollout.rewards import builtin\n"
        "from rlcore.sample import Sample\n"
        "builtin.load('ifbench')(None, Sample(response='x'))"
    )
    assert "NoRewardError: its metadata needs instruction_id_list" in python(code, str(tmp_path))
