"""The types `f1` and `random`: words in common with the label, and a coin."""

import hashlib
import re
import string
import unicodedata
from collections import Counter
from typing import Any

from rlcore.rollout.rewards.builtin.extract import labels_of
from rlcore.sample import Sample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CLOSED = frozenset(["yes", "no", "noanswer"])
"""Answers of which a part in common is worth nothing."""


def f1(args: Any, sample: Sample) -> float:
    """The F1 of words that response and label have in common (SQuAD, arXiv 1606.05250).

    Of a list of labels the best counts.

    Raises:
        NoRewardError: there is no label.
    """
    return max(token_f1(sample.response, label) for label in labels_of(sample.label, unbox=False))


def token_f1(response: str, label: str) -> float:
    """F1 of the words of two texts, each counted as often as it occurs."""
    left, right = normal_text(response), normal_text(label)
    if left != right and (left in _CLOSED or right in _CLOSED):
        return 0.0
    words, wanted = left.split(), right.split()
    if not words or not wanted:
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def normal_text(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    lowered = unicodedata.normalize("NFC", text).lower()
    kept = "".join(
        char
        for char in lowered
        if char not in string.punctuation and not unicodedata.category(char).startswith("P")
    )
    return " ".join(_ARTICLES.sub(" ", kept).split())


def coin(args: Any, sample: Sample) -> float:
    """0 or 1 by the sample's own identity: the same sample always gets the same."""
    identity = f"{sample.prompt_id}\0{sample.seed}\0{sample.index}\0{sample.response}"
    return float(hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()[0] & 1)
