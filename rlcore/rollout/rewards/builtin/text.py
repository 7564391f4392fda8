r"""The text of an answer made plain, and cut into tokens.

LaTeX and Unicode write the same thing in many ways; here each becomes one. What was inside \text
and the like stays together as words, so that "\text{cm}" is never c times m.

Invariants:
- Time is linear in the length, which is at most `MAX_CHARS`.
"""

import re
import unicodedata
from typing import NamedTuple

from rlcore.rollout.rewards.builtin.units import BARE_UNITS, LARGE, SPEEDS
from rlcore.rollout.rewards.builtin.values import UnreadableError

MAX_CHARS = 1_000
OPEN, CLOSE = "\x02", "\x03"
"""Around what was inside \\text."""
ROW = "\x04"
"""Between two rows of a matrix."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SIGNS: dict[str, str | int | None] = {
    **dict.fromkeys("−–—‒﹣－", "-"),  # noqa: RUF001
    **dict.fromkeys("×✕", r"\times "),  # noqa: RUF001
    **dict.fromkeys("·⋅∙", r"\cdot "),
    "÷": "/",
    "⁄": "/",  # noqa: RUF001
    "∕": "/",  # noqa: RUF001
    "π": r"\pi ",
    "∞": r"\infty ",
    "√": r"\sqrt ",
    "±": r"\pm ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∪": r"\cup ",  # noqa: RUF001
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "℃": f"{OPEN}degC{CLOSE}",
    "℉": f"{OPEN}degF{CLOSE}",
    "€": f"{OPEN}euro{CLOSE}",
    "£": f"{OPEN}gbp{CLOSE}",
    "¥": f"{OPEN}yen{CLOSE}",
    "′": "'",  # noqa: RUF001
    "“": '"',
    "”": '"',
    "’": "'",  # noqa: RUF001
}
_FRACTIONS = {
    char: unicodedata.normalize("NFKC", char).split("\u2044") for char in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"
}
_SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
        (r"\\!|\{,\}", lambda m: "" if m[0] == r"\!" else ","),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\(?:displaystyle|limits)(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:leq|leqslant|leslant)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge "),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"\\(?:lt|gt)(?![A-Za-z])", lambda m: "<" if m[0] == r"\lt" else ">"),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\\(?:ast|bullet)(?![A-Za-z])", r"\\cdot "),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\degree(?![A-Za-z])", r"^\\circ "),
        (
            r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:([CF])(?![A-Za-z])|"
            r"\\(?:text|mathrm)\s*\{\s*([CF])\s*\})",
            lambda m: f"{OPEN}deg{m[1] or m[2]}{CLOSE}",
        ),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", f"{OPEN}degrees{CLOSE}"),
        (r"\\?%", f"{OPEN}percent{CLOSE}"),
        (r"\\text(?:dollar|sterling)", f"{OPEN}dollars{CLOSE}"),
        (r"(?:\\ldots|\\dots|\\cdots|…)(?![A-Za-z])", "..."),
    )
]
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|normal)?|mbox|hbox|math(?:rm|bf|it|sf|bb|cal)|operatorname\*?)"
    r"\s*\{([^{}]*)\}"
)
_POWER_SIGNS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_FUNCTIONS = (
    "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp|sqrt|pi|infty|"
    "infinity|inf|min|max|gcd|lcm|det|theta|alpha|beta|gamma|lambda"
)
_PLAIN_FUNCTIONS = re.compile(rf"(?<![\\A-Za-z\x02])({_FUNCTIONS})(?![A-Za-z\x03])")
_THOUSANDS = r"(?<![\d.,])(?!0)\d{1,3}(?:%s\d{3})+(?![\d]|,\d)"
_COMMAS = re.compile(_THOUSANDS % ",")
_SPACES = re.compile(_THOUSANDS % " ")


def plain(text: str) -> str:
    """One spelling for what LaTeX and Unicode spell in many ways.

    Raises:
        UnreadableError: it is too long.
    """
    if len(text) > MAX_CHARS:
        raise UnreadableError("too long")
    # Two backslashes end a row of a matrix; elsewhere somebody escaped twice.
    text = text.replace(r"\\", ROW if r"\begin" in text else "\\")
    text = _POWER_SIGNS.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    for char, (above, below) in _FRACTIONS.items():
        text = text.replace(char, rf"\frac{{{above}}}{{{below}}}")
    text = text.translate(str.maketrans(_SIGNS))
    text = unicodedata.normalize("NFKC", text)
    if len(text) > 3 * MAX_CHARS:
        raise UnreadableError("too long")
    text = re.sub(r"\\\$", f"{OPEN}dollars{CLOSE}", text)
    text = re.sub(r"\$|\\[()\[\]](?!\w*\{)", "", text)
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    for _ in range(3):
        text = _TEXT.sub(_words, text)
    text = _PLAIN_FUNCTIONS.sub(lambda m: rf"\{m[1]} ", text)
    text = re.sub(r"\\(?:infinity|inf)(?![A-Za-z])", r"\\infty", text)
    text = re.sub(r"\s+", " ", text).strip()
    # What LaTeX lets one write without braces, and mixed numbers on one line.
    text = re.sub(r"\\frac ?(\d)", r"\\frac{\1}", text)
    text = re.sub(r"\\frac(\{[^{}]*\}) ?(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"(?<![\d.])(\d+) (\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", text)
    return re.sub(r"(?:\s*(?<!\.)[.;,:]|\\+)$", "", text).strip()


def _words(match: re.Match[str]) -> str:
    content = match[1].strip()
    single = len(content) == 1 and not match[0].startswith(r"\text")
    known = single or not re.search("[A-Za-z]", content)
    return (
        f" {content} " if known else f"{OPEN}{content.replace(OPEN, '').replace(CLOSE, '')}{CLOSE}"
    )


def join_thousands(text: str, *, commas: bool) -> str:
    """Without the separators between groups of three digits.

    Args:
        commas: take commas for such separators too, not only thin spaces.
    """
    text = _SPACES.sub(lambda m: m[0].replace(" ", ""), text)
    return _COMMAS.sub(_joined, text) if commas else text


def _joined(match: re.Match[str]) -> str:
    # Alone in brackets, "(1,234)" is a pair.
    around = match.string[match.start() - 1 : match.start()], match.string[match.end() :][:1]
    pair = around[0] in ("(", "[") and around[1] in (")", "]")
    return match[0] if pair else match[0].replace(",", "")


def squeezed(text: str) -> str:
    """A text without what never matters: marks around words, and spaces beside signs."""
    spaced = re.sub(rf"[\s{OPEN}{CLOSE}]+", " ", text).strip()
    # "5 5" is not "55".
    return re.sub(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])", "", spaced)


def as_words(text: str) -> str:
    """A text as lower-case words, without signs between them and the article before them."""
    words = " ".join(re.findall(r"[^\W\d_]+|\d+", text.lower()))
    return re.sub(r"^(?:the|an?) ", "", words)


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """The pieces of a text between separators that stand in no bracket."""
    pieces, depth, start, k = [], 0, 0, 0
    while k < len(text):
        if text[k] == "\\" and text[k + 1 : k + 2] in ("{", "}"):
            depth += 1 if text[k + 1] == "{" else -1
            k += 2
            continue
        if text[k] in "([{" + OPEN:
            # A word that separates, such as "or", may stand in its marks.
            if depth == 0 and (found := separators.match(text, k)):
                pieces.append(text[start:k])
                start = k = found.end()
                continue
            depth += 1
        elif text[k] in ")]}" + CLOSE:
            depth -= 1
        elif depth == 0 and (found := separators.match(text, k)) and found.end() > k:
            pieces.append(text[start:k])
            start = k = found.end()
            continue
        k += 1
    return [*pieces, text[start:]]


class Token(NamedTuple):
    """A piece of an expression: `kind` is number, word, command, letter or sign."""

    kind: str
    text: str


_TOKEN = re.compile(
    r"(?P<number>\d+\.(?![.\d])|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)"
    rf"|{OPEN}(?P<words>[^{OPEN}{CLOSE}]*){CLOSE}"
    r"|(?P<command>\\(?:[A-Za-z]+|[{}|]))"
    r"|(?P<run>[A-Za-z]+)|(?P<sign>\*\*|[-+*/^_(){}\[\]|!:,'<>=&])|(?P<space>\s+)"
)
LONG_WORD = 4
"""Letters that stand together and are no unit are letters of a formula up to one less."""


def tokens_of(text: str) -> list[Token]:
    """A plain text as tokens.

    Raises:
        UnreadableError: it has a sign that no expression has.
    """
    out: list[Token] = []
    k = 0
    while k < len(text):
        match = _TOKEN.match(text, k)
        if match is None:
            raise UnreadableError(f"{text[k]!r} is no part of an expression")
        k = match.end()
        kind = match.lastgroup or ""
        if kind == "words":
            out += [
                Token("word" if part[0].isalpha() else "sign", part.lower())
                for part in re.findall(r"[^\W\d_]+|[/^-]|\d+", match["words"])
            ]
        elif kind == "run":
            run = match["run"]
            known = run.lower() in BARE_UNITS or run.lower().rstrip("s") in BARE_UNITS
            if len(run) > 1 and (
                known
                or run.lower() in LARGE
                or run in SPEEDS
                or len(run) >= LONG_WORD
                or run.lower() == "per"
            ):
                out.append(Token("word", run.lower()))
            else:
                out += [Token("letter", letter) for letter in run]
        elif kind == "sign":
            out.append(Token("sign", "^" if match[0] == "**" else match[0]))
        elif kind != "space":
            out.append(Token(kind, match[0]))
    return out
