r"""The types `math`, `deepscaler`, `dapo` and `math_verify`: is the final answer the label?

What counts as the same answer is `rlcore.rollout.rewards.builtin.answers`; docs/rewards.md has
examples of it.
"""

import importlib
import logging
import re
from functools import lru_cache
from typing import Any

from rlcore.errors import PluginError
from rlcore.rollout.rewards.builtin.answers import same
from rlcore.rollout.rewards.builtin.extract import after_thinking, labels_of, last_box
from rlcore.sample import Sample

DAPO_WINDOW = 300
"""The answer line of `dapo` must lie within so many last characters."""
_ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)
_MARKS = re.compile(r"^[\s*_`]+|[\s*_`.]+$|<\|[^|>]*\|>|</s>")
INVALID = "[INVALID]"


def math(args: Any, sample: Sample, *, boxed: bool = False) -> float:
    r"""1 where the last `\boxed{...}` holds the label, else 0.

    Args:
        args: not used.
        sample: its label may be a text, a number, or a list of alternatives.
        boxed: the response is the answer itself.

    Raises:
        NoRewardError: there is no label.
    """
    labels = labels_of(sample.label)
    answer = sample.response if boxed else last_box(sample.response)
    return _verdict(answer, labels)


def deepscaler(args: Any, sample: Sample, *, boxed: bool = False) -> float:
    """As `math`, of what follows the thinking; 0 where the thinking never ends."""
    labels = labels_of(sample.label)
    if boxed:
        return _verdict(sample.response, labels)
    text = after_thinking(sample.response)
    return _verdict(None if text is None else last_box(text), labels)


def dapo(args: Any, sample: Sample, *, boxed: bool = False) -> dict[str, Any]:
    """The score of the last line `Answer: ...` (DAPO, arXiv 2503.14476).

    Returns:
        `score` 1.0 or -1.0, `acc` whether it is right, `pred` the answer that was found.
    """
    labels = labels_of(sample.label)
    answer = sample.response if boxed else _answer_line(sample.response)
    right = _verdict(answer, labels) == 1.0
    pred = INVALID if answer is None else answer[:DAPO_WINDOW]
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def math_verify(args: Any, sample: Sample, *, boxed: bool = False) -> float:
    r"""1 where the package math-verify finds the label in the response, else 0.

    It uses a computer algebra system and may take long; its own time limits are off, since the
    worker process that this runs in has one.

    Raises:
        PluginError: the package is not installed.
    """
    package = load_math_verify()
    labels = labels_of(sample.label, unbox=False)
    response = rf"\boxed{{{sample.response}}}" if boxed else sample.response
    answer = package.parse(response, parsing_timeout=None)
    for label in labels:
        gold = package.parse(
            rf"\boxed{{{label}}}" if "\\boxed" not in label else label, parsing_timeout=None
        )
        if package.verify(gold, answer, timeout_seconds=None):
            return 1.0
    return 0.0


@lru_cache(maxsize=1)
def load_math_verify() -> Any:
    """The package math-verify.

    Raises:
        PluginError: it is not installed.
    """
    # It warns at each call that it is without its time limits.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise PluginError(
            f"it needs the package math-verify, which cannot be imported ({error}): pip install "
            "'math-verify[antlr4_13_2]', or use reward.rm_type = 'math', which needs no package"
        ) from None


def _verdict(answer: str | None, labels: list[str]) -> float:
    if answer is None or not answer.strip():
        return 0.0
    return float(any(same(answer, label) for label in labels))


def _answer_line(response: str) -> str | None:
    lines = _ANSWER_LINE.findall(response[-DAPO_WINDOW:])
    if not lines:
        return None
    line = lines[-1]
    for _ in range(2):
        line = _MARKS.sub("", line)
    if r"\boxed" in line:
        return last_box(line)
    return line.strip()
