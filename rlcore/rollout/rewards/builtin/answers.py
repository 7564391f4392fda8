r"""Whether two answers to a mathematical question are the same.

An answer is a number or expression, perhaps with a unit; a tuple or interval, whose brackets and
order count; a set or a plain list, whose order does not; a union, a matrix, an equation or an
inequality; or words. Both sides are read, and compared by value.

Invariants:
- `same` never raises, and takes bounded time whatever the texts are.
- What cannot be read is equal to nothing but the same text.
- It is pure: the same texts give the same verdict on every machine.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from rlcore.rollout.rewards.builtin import values
from rlcore.rollout.rewards.builtin.expression import evaluate, is_plain_number
from rlcore.rollout.rewards.builtin.text import (
    CLOSE,
    OPEN,
    ROW,
    Token,
    as_words,
    join_thousands,
    plain,
    split_top,
    squeezed,
    tokens_of,
)
from rlcore.rollout.rewards.builtin.units import NO_NOUNS, Unit, agree, read_unit
from rlcore.rollout.rewards.builtin.values import UnreadableError, Value

MAX_ITEMS = 60
"""Most elements of a list; longer ones are compared as text."""
MAX_NESTING = 6
MAX_SIDES = 4
ORDERED = frozenset(["()", "[]", "(]", "[)"])
_EMPTY = values.atom("empty")
_COMMA = re.compile(r"\s*[,;]\s*")
_OR = re.compile(
    rf"\s*(?:{OPEN}\s*(?:or|and|,\s*and|,\s*or)\s*{CLOSE}|(?<![A-Za-z])(?:or|and)"
    r"(?![A-Za-z]))\s*"
)
_CUP = re.compile(r"\s*\\cup(?![A-Za-z])\s*")
_RELATION = re.compile(r"\s*(<=|>=|!=|=|<|>|\\(?:le|ge|ne|in|approx|equiv)(?![A-Za-z]))\s*")
_FLIPPED = {"<": ">", r"\le": r"\ge"}
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?P<kind>[pbvVB]?matrix|array)\}(?:\{[lcr|]*\})?(?P<rows>.*)"
    r"\\end\{(?P=kind)\}\s*[)\]]?"
)
_BASED = re.compile(r"\(?(?P<digits>[0-9]+)\)?_(?:\{?(?P<base>\d+)\}?)")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\((?:\\?[A-Za-z]+)(?:,\\?[A-Za-z]+)*\))?")
_WORDS = re.compile(rf"[A-Za-z{OPEN}{CLOSE} ,.'()-]+")


@dataclass(frozen=True)
class Quantity:
    """A number or an expression with what stands behind it."""

    value: Value
    unit: Unit
    is_plain: bool


@dataclass(frozen=True)
class Group:
    """Several answers in one: `kind` is the brackets, or what holds them together."""

    kind: str
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Relation:
    """An equation, an inequality, or a chain of them: sides with signs between."""

    signs: tuple[str, ...]
    sides: tuple["Answer", ...]
    names: tuple[str, ...]
    """The text of each side."""


@dataclass(frozen=True)
class Words:
    """What is no mathematics, or cannot be read."""

    text: str


Answer = Quantity | Group | Relation | Words


def same(answer: str, label: str) -> bool:
    """Whether an answer says what the label says.

    Args:
        answer: of the model, without the box around it.
        label: the right one. Where it is a number, the answer must be one written out.
    """
    try:
        left, right = plain(answer), plain(label)
    except UnreadableError:
        return answer.strip() == label.strip() != ""
    if not squeezed(left) or not squeezed(right):
        return False
    if squeezed(left) == squeezed(right):
        return True
    # A comma before three digits may separate thousands, or two answers: both sides one way.
    readings = (True, False) if "," in left + right else (True,)
    return any(
        _same(_read(join_thousands(left, commas=c)), _read(join_thousands(right, commas=c)))
        for c in readings
    )


# --- reading --------------------------------------------------------------------------------------


def _read(text: str, nesting: int = 0) -> Answer:
    text = text.strip()
    while text.startswith(OPEN) and text.endswith(CLOSE) and text.count(OPEN) == 1:
        text = text[1:-1].strip()
    try:
        return _structure(text, nesting) or _quantity(text)
    except (UnreadableError, ValueError, ZeroDivisionError, OverflowError):
        return Words(text)


def _structure(text: str, nesting: int) -> Answer | None:
    """An answer that is made of several; None where it is one."""
    if nesting > MAX_NESTING:
        raise UnreadableError("nested too deep")
    if _is_words(text):
        pieces = split_top(text, _OR)
        return None if len(pieces) < 2 else _group("list", pieces, nesting)
    if match := _MATRIX.fullmatch(text):
        kind = "determinant" if match["kind"] in ("vmatrix", "Vmatrix") else "matrix"
        return _group(kind, _rows(match["rows"]), nesting, "row")
    if brackets := _brackets(text):
        kind, inner = brackets
        items = split_top(inner, _COMMA)
        if kind == "{}" or (len(items) > 1 and kind in ORDERED):
            if kind == "{}" and not inner.strip():
                return _quantity(r"\emptyset")
            return _group(kind, items, nesting)
        if kind == "braces" and len(items) > 1:
            return _group("list", items, nesting)
    for separators, kind in ((_OR, "list"), (_COMMA, "list"), (_CUP, "union")):
        pieces = split_top(text, separators)
        if len(pieces) > 1:
            if kind == "list":
                pieces = [p for piece in pieces for p in split_top(piece, _COMMA) if p.strip()]
            return _group(kind, pieces, nesting)
    if len(pieces := split_top(text, re.compile(f"({_RELATION.pattern})"))) > 1:
        return _relation(text, pieces, nesting)
    if r"\pm" in text:
        sides = (re.sub(r"\\pm", "+", text), re.sub(r"\\pm", "-", text))
        return _group("list", list(sides), nesting)
    return None


def _group(kind: str, pieces: list[str], nesting: int, inner: str = "") -> Answer:
    if not 0 < len(pieces) <= MAX_ITEMS:
        raise UnreadableError("too many elements")
    if inner:
        rows = [_group("row", piece.split("&"), nesting + 1) for piece in pieces]
        return Group(kind, tuple(rows))
    items: list[Answer] = []
    for piece in pieces:
        item = _read(piece, nesting + 1)
        # "1 \pm 2, 5" is a list of three.
        flat = isinstance(item, Group) and item.kind == "list" == kind
        items += item.items if flat and isinstance(item, Group) else (item,)
    return Group(kind, tuple(items))


def _rows(text: str) -> list[str]:
    return [row for row in text.split(ROW) if row.strip()]


def _brackets(text: str) -> tuple[str, str] | None:
    """The kind of brackets around a whole text, and what they hold."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        kind, inner = "{}", text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        kind, inner = text[0] + text[-1], text[1:-1]
    elif text[:1] == "{" and text[-1:] == "}":
        kind, inner = "braces", text[1:-1]
    else:
        return None
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return None  # "(1) + (2)": the last bracket closes another one.
    return (kind, inner) if depth == 0 else None


def _relation(text: str, pieces: list[str], nesting: int) -> Answer:
    if len(pieces) > MAX_SIDES:
        raise UnreadableError("too many sides")
    signs = _top_signs(text)
    if len(signs) != len(pieces) - 1 or not all(p.strip() for p in pieces):
        raise UnreadableError("a relation with a side missing")
    if signs[-1] == r"\approx":
        # What stands before it is the exact answer, unless it is a mere name.
        name = squeezed(pieces[0])
        named = len(signs) == 1 and _NAME.fullmatch(name) and name not in (r"\pi", "e")
        if named:
            signs[-1] = "="
        else:
            signs, pieces = signs[:-1], pieces[:-1]
            if not signs:
                return _read(pieces[0], nesting + 1)
    sides = tuple(_read(piece, nesting + 1) for piece in pieces)
    return Relation(tuple(signs), sides, tuple(squeezed(p) for p in pieces))


def _top_signs(text: str) -> list[str]:
    """The relation signs of a text that stand in no bracket."""
    spellings = {"<=": r"\le", ">=": r"\ge", "!=": r"\ne", r"\equiv": "="}
    out, rest = [], text
    while len(pieces := split_top(rest, _RELATION)) > 1:
        match = _RELATION.match(rest, len(pieces[0]))
        assert match is not None
        out.append(spellings.get(match[1], match[1]))
        rest = rest[match.end() :]
    return out


def _is_words(text: str) -> bool:
    """Whether a text is words alone: no digit, no sign of a formula, and a run of three letters."""
    if not _WORDS.fullmatch(text):
        return False
    return OPEN in text or re.search("[A-Za-z]{3}", text) is not None


def _quantity(text: str) -> Answer:
    if _is_words(text):
        return Words(text)
    if based := _BASED.fullmatch(squeezed(text)):
        unit = Unit(dims=(("base", int(based["base"])),))
        return Quantity(values.number(int(based["digits"])), unit, True)
    tokens, unit = _take_unit(tokens_of(text))
    if any(token.kind == "word" for token in tokens):
        return Words(text)
    value = evaluate(tokens)
    if unit.times != 1:
        value = values.multiply(value, values.number(unit.times))
    return Quantity(value, unit, is_plain_number(tokens))


def _take_unit(tokens: list[Token]) -> tuple[list[Token], Unit]:
    """An expression without the unit behind it (or the currency before it), and that unit."""
    front = [t.text for t in tokens[:1] if t.text in ("dollars", "euro", "gbp", "yen")]
    minus = [t for t in tokens[:1] if t.text == "-"]
    if minus and len(tokens) > 1 and tokens[1].text in ("dollars", "euro", "gbp", "yen"):
        front, tokens = [tokens[1].text], [tokens[0], *tokens[2:]]
    elif front:
        tokens = tokens[1:]
    first = next((k for k, token in enumerate(tokens) if token.kind == "word"), len(tokens))
    words = [t.text for t in tokens[first:] if t.text not in ("{", "}")]
    body = tokens[:first]
    if words and body and body[-1].text in ("/", r"\cdot"):
        words, body = [*(["/"] if body[-1].text == "/" else []), *words], body[:-1]
    if not words and not front:
        return tokens, Unit()
    if not body or any(word in NO_NOUNS for word in words):
        raise UnreadableError("words that are no unit")
    unit = read_unit([*front, *(w for w in words if w != r"\cdot")])
    if unit is None or not all(w[0].isalpha() or w in "/^-" or w.isdigit() for w in words):
        raise UnreadableError("words that are no unit")
    return body, unit


# --- comparing ------------------------------------------------------------------------------------


def _same(answer: Answer, label: Answer) -> bool:
    try:
        return _compare(answer, label)
    except (UnreadableError, OverflowError):
        return False


def _compare(answer: Answer, label: Answer) -> bool:
    if isinstance(answer, Relation) or isinstance(label, Relation):
        return _same_relation(answer, label)
    if isinstance(answer, Group) and isinstance(label, Group):
        return _same_group(answer, label)
    if isinstance(answer, Quantity) and isinstance(label, Quantity):
        return _same_quantity(answer, label)
    if isinstance(answer, Words) and isinstance(label, Words):
        return _same_words(answer.text, label.text)
    # A set of one is that one, unless it is the empty set.
    if isinstance(answer, Group) and isinstance(label, Quantity):
        return _is_one(answer) and label.value != _EMPTY and _same(answer.items[0], label)
    if isinstance(answer, Quantity) and isinstance(label, Group):
        return _is_one(label) and answer.value != _EMPTY and _same(answer, label.items[0])
    return False


def _is_one(group: Group) -> bool:
    return group.kind in ("{}", "list", "union") and len(group.items) == 1


def _same_words(answer: str, label: str) -> bool:
    if any(char.isdigit() or char in "\\^_+=*/<>" for char in answer + label):
        left, right = squeezed(answer), squeezed(label)
        # "3:30 PM" is no formula; in one, case counts.
        return left == right or ("\\" not in left and left.lower() == right.lower())
    return as_words(answer) == as_words(label) != ""


def _same_group(answer: Group, label: Group) -> bool:
    loose = ("list", "{}")
    if answer.kind in loose and label.kind in loose:
        items, wanted = list(answer.items), list(label.items)
        if "{}" in (answer.kind, label.kind):
            items, wanted = _distinct(items), _distinct(wanted)
        return _same_in_any_order(items, wanted)
    if answer.kind != label.kind:
        return False
    if answer.kind == "union":
        return _same_in_any_order(list(answer.items), list(label.items))
    pairs = zip(answer.items, label.items, strict=False)
    return len(answer.items) == len(label.items) and all(_same(a, b) for a, b in pairs)


def _distinct(items: list[Answer]) -> list[Answer]:
    out: list[Answer] = []
    for item in items:
        if not any(_same(item, known) for known in out):
            out.append(item)
    return out


def _same_in_any_order(items: list[Answer], wanted: list[Answer]) -> bool:
    if len(items) != len(wanted):
        return False
    left = list(items)
    for one in wanted:
        found = next((k for k, item in enumerate(left) if _same(item, one)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_relation(answer: Answer, label: Answer) -> bool:
    if isinstance(answer, Relation) and isinstance(label, Relation):
        if answer.signs == label.signs == ("=",) and _is_named(answer) and _is_named(label):
            return answer.names[0] == label.names[0] and _same(answer.sides[1], label.sides[1])
        return _same_inequality(answer, label)
    if isinstance(answer, Relation):
        end = _end_of(answer)
        return end is not None and _same(end, label)
    assert isinstance(label, Relation)
    end = _end_of(label) if _is_named(label) else None
    return end is not None and _same(answer, end)


def _is_named(relation: Relation) -> bool:
    return _NAME.fullmatch(relation.names[0]) is not None


def _end_of(relation: Relation) -> Answer | None:
    """What an equation comes to: "x = 5", "2 + 3 = 5", "x in {1, 2}"."""
    if set(relation.signs) == {"="} or (relation.signs == (r"\in",) and _is_named(relation)):
        return relation.sides[-1]
    return None


def _same_inequality(answer: Relation, label: Relation) -> bool:
    left, right = _links(answer), _links(label)
    if len(left) != len(right):
        return False
    return all(any(_same_link(a, b) for a in left) for b in right)


def _links(relation: Relation) -> list[tuple[str, Value]]:
    """Each sign with the difference of its sides, which it compares with zero; `<` and `\\le` as
    `>` and `\\ge`."""
    out = []
    for k, sign in enumerate(relation.signs):
        a, b = relation.sides[k : k + 2]
        if not (isinstance(a, Quantity) and isinstance(b, Quantity)):
            raise UnreadableError("a relation between what are no numbers")
        flipped = _FLIPPED.get(sign)
        high, low = (b, a) if flipped else (a, b)
        out.append((flipped or sign, values.add(high.value, values.negative(low.value))))
    return out


def _same_link(a: tuple[str, Value], b: tuple[str, Value]) -> bool:
    factor = values.ratio(a[1], b[1])
    return a[0] == b[0] and factor is not None and (factor > 0 or a[0] in ("=", r"\ne"))


def _same_quantity(answer: Quantity, label: Quantity) -> bool:
    if not agree(answer.unit, label.unit):
        return False
    right = values.rational(label.value)
    if label.is_plain and not answer.is_plain:
        return False
    if answer.unit.percent != label.unit.percent:
        left = values.rational(answer.value)
        if left is None or right is None:
            return False
        return _same_percent(left, right, label_is_percent=label.unit.percent)
    if answer.unit.dims and label.unit.dims:
        left_value = values.multiply(answer.value, values.number(answer.unit.factor))
        right_value = values.multiply(label.value, values.number(label.unit.factor))
        return values.equal(left_value, right_value)
    return values.equal(answer.value, label.value)


def _same_percent(answer: Fraction, label: Fraction, *, label_is_percent: bool) -> bool:
    """Whether a number and a percentage agree.

    A label in percent is met by the number of percents and by its value. A bare label is met by
    "p %" where it is p / 100, or where it is p and can be meant as percents, being no less than 1.
    """
    if label_is_percent:
        return answer in (label, label / 100)
    if answer == label:
        return abs(label) >= 1 or label == 0
    return answer / 100 == label and (label.denominator != 1 or abs(label) <= 1)
