"""The type `gpqa`: which of some choices the response picks.

The last word counts: of several sentences that name an answer, the last one is taken.
"""

import re
from collections.abc import Iterable
from typing import Any

from rlcore.rollout.rewards.builtin.extract import THINK_END, last_box
from rlcore.rollout.rewards.protocol import NoRewardError
from rlcore.sample import Sample

ALL_LETTERS = "ABCDEFGHIJ"
_MARKED = r"(?:\(\s*(?P<p>[A-Za-z])\s*\)|\*+\s*(?P<b>[A-Za-z])\s*\*+|\\text\{(?P<t>[A-Za-z])\})"
_BARE = r"(?P<u>[A-Z])(?![A-Za-z0-9'])|(?P<l>[a-z])(?=[).]|\s*$)"
_SAID = (
    re.compile(
        rf"(?i:answer|option|choice)[\s*_]*(?i:is|:|=)?[\s:*_$\"']{{0,8}}(?:{_MARKED}|{_BARE})",
        re.MULTILINE,
    ),
    re.compile(r"\(?(?P<u>[A-Z])\)?[\s*_]+(?i:is)[\s*_]+(?i:the[\s*_]+)?(?i:correct|right)"),
)
_ALONE = re.compile(
    # "A" and "I" before a small letter are words.
    r"(?:^|(?<=[\s(*\"'$:]))(?:(?P<u>[B-HJ-Z])(?![\w'])|(?P<a>[AI])(?![\w']| [a-z]))",
    re.MULTILINE,
)


def gpqa(args: Any, sample: Sample) -> float:
    """1 where the response picks the right choice, else 0.

    The metadata may hold `choices` (a list, or letter -> text), `correct_letter` and
    `valid_letters`. The label is a letter, the number of a choice from 0, or the text of one.

    Raises:
        NoRewardError: nothing says which choice is right.
    """
    metadata = sample.metadata
    choices = _choices(metadata.get("choices"))
    letters = _letters(metadata.get("valid_letters"), choices)
    right = _right_letter(sample.label, metadata.get("correct_letter"), choices, letters)
    texts = [t for t in (choices.get(right or ""), *_texts(sample, right)) if t]
    if right is None and not texts:
        raise NoRewardError(
            "the sample has no label that is a letter, the number of a choice, or a text; "
            "set data.label_key, or correct_letter in its metadata"
        )
    response = sample.response.rpartition(THINK_END)[2]
    picked = picked_letter(response, letters)
    if right is not None and picked is not None:
        return float(picked == right)
    words = f" {_normal(response)} "
    return float(any(f" {_normal(text)} " in words for text in texts if _normal(text)))


def picked_letter(response: str, letters: str) -> str | None:
    """The letter that a response picks; None where it picks none of the valid ones.

    Args:
        response: what the model said, without its thinking.
        letters: the valid ones.
    """
    box = last_box(response)
    if box is not None and (letter := _only_letter(box, letters)):
        return letter
    said = [found for pattern in _SAID for found in _found(pattern.finditer(response), letters)]
    if said:
        return max(said)[1]
    alone = _found(_ALONE.finditer(response), letters)
    return alone[-1][1] if alone else None


def _found(matches: Iterable[re.Match[str]], letters: str) -> list[tuple[int, str]]:
    pairs = [(m.start(), next(g for g in m.groupdict().values() if g).upper()) for m in matches]
    return [(at, letter) for at, letter in pairs if letter in letters]


def _only_letter(box: str, letters: str) -> str | None:
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\b|[^A-Za-z]", "", box)
    return text.upper() if len(text) == 1 and text.upper() in letters else None


def _choices(choices: Any) -> dict[str, str]:
    if isinstance(choices, dict):
        return {str(k).strip().upper(): str(v) for k, v in choices.items()}
    if isinstance(choices, (list, tuple)):
        return dict(zip(ALL_LETTERS, map(str, choices), strict=False))
    return {}


def _letters(valid: Any, choices: dict[str, str]) -> str:
    if valid:
        return "".join(str(letter).strip().upper() for letter in valid)
    return "".join(choices) or ALL_LETTERS


def _right_letter(label: Any, correct: Any, choices: dict[str, str], letters: str) -> str | None:
    if isinstance(correct, str) and correct.strip().upper() in tuple(letters):
        return correct.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    if not isinstance(label, str):
        return None
    name = label.strip().strip("().").upper()
    if len(name) == 1 and name in letters:
        return name
    wanted = _normal(label)
    return next((k for k, text in choices.items() if wanted and _normal(text) == wanted), None)


def _texts(sample: Sample, right: str | None) -> list[str]:
    """What the right choice says, where a response may say that and no letter."""
    found = [sample.metadata.get(key) for key in ("correct_answer", "answer_text")]
    if isinstance(sample.label, str) and len(sample.label.strip().strip("().")) > 1:
        found.append(sample.label)
    return [str(text) for text in found if text is not None]


def _normal(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))
