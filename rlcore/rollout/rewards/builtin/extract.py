r"""Where in a response the answer stands.

Invariants:
- Time is linear in the length of the response.
- The last box counts, and only it: an answer that was boxed earlier and then given up is none.
"""

import re
from typing import Any

from rlcore.rollout.rewards.protocol import NoRewardError

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")
_UNBRACED = re.compile(r"\\boxed\s+([^\s{}$\\]+)")
THINK_END = "</think>"
RESPONSE_MARK = "###Response"


def last_box(text: str) -> str | None:
    r"""What is inside the last `\boxed{...}` or `\fbox{...}` that is in no other box.

    None where there is none, and where the last one is never closed: the response was cut off.
    """
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        token = match[0]
        if token.startswith((r"\boxed", r"\fbox")):
            open_.append((match.start(), match.end()))
        elif token == "{":
            open_.append(None)
        elif token == "}" and open_ and (box := open_.pop()) is not None:
            # What lies inside is part of this box.
            while found and found[-1][0] > box[0]:
                found.pop()
            found.append((*box, match.start()))
    end = found[-1][2] if found else -1
    last_open = max((box[0] for box in open_ if box is not None), default=-1)
    if last_open > end:
        return None
    for match in _UNBRACED.finditer(text, end + 1):
        found.append((match.start(), match.start(1), match.end(1)))
    if not found:
        return None
    return unboxed(text[found[-1][1] : found[-1][2]])


def unboxed(text: str) -> str:
    r"""A text without the `\boxed{` and `}` around parts of it."""
    out, open_, at = [], list[bool](), 0
    for match in _BRACES.finditer(text):
        token = match[0]
        is_box = token.startswith((r"\boxed", r"\fbox"))
        closes_box = token == "}" and bool(open_) and open_[-1]
        if is_box or closes_box:
            out.append(text[at : match.start()])
            at = match.end()
        if is_box or token == "{":
            open_.append(is_box)
        elif token == "}" and open_:
            open_.pop()
    return "".join([*out, text[at:]])


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`, else the first `###Response`; None where neither is."""
    if THINK_END in text:
        return text.rpartition(THINK_END)[2]
    if RESPONSE_MARK in text:
        return text.split(RESPONSE_MARK)[1]
    return None


def labels_of(label: Any, *, unbox: bool = True) -> list[str]:
    r"""The right answers as texts: a list of them holds alternatives.

    Numbers are written out as they are, and 0 is a label as any other. Of a text that holds a box,
    what is in it counts.

    Raises:
        NoRewardError: there is no label, so nothing can be right.
    """
    found = label if isinstance(label, (list, tuple)) else [label]
    if hasattr(label, "tolist"):
        listed = label.tolist()
        found = listed if isinstance(listed, list) else [listed]
    texts = [_label_text(one) for one in found]
    if not texts or not all(text.strip() for text in texts):
        raise NoRewardError("the sample has no label to compare with; set data.label_key")
    boxed = [last_box(text) if unbox and r"\boxed" in text else None for text in texts]
    return [box if box is not None else text for box, text in zip(boxed, texts, strict=True)]


def _label_text(label: Any) -> str:
    if label is None:
        return ""
    if isinstance(label, (str, int, float)):
        return str(label)
    raise NoRewardError(f"the label is a {type(label).__name__}, not a text, a number or a list")
