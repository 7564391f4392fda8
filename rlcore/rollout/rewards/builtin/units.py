"""Units behind a number: what they measure and how large they are.

A word that is no unit is a noun, such as the "apples" of "5 apples".
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """What stands behind a number.

    Attributes:
        times: what the number is to be multiplied with, as by "million".
        factor: how many of the base units one is.
        dims: powers of the base units, sorted; `("unit", n)` for a "unit" of any kind.
        nouns: words that are no unit.
        percent: the number counts hundredths.
    """

    times: int = 1
    factor: Fraction = Fraction(1)
    dims: tuple[tuple[str, int], ...] = ()
    nouns: tuple[str, ...] = ()
    percent: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether nothing stands there that could disagree."""
        return not self.dims and not self.nouns


def _table() -> Iterator[tuple[str, tuple[Fraction, str, int]]]:
    rows: list[tuple[str, str, int | Fraction]] = [
        ("m meter metre", "metre", 1),
        ("km kilometer kilometre", "metre", 1000),
        ("dm decimeter decimetre", "metre", Fraction(1, 10)),
        ("cm centimeter centimetre", "metre", Fraction(1, 100)),
        ("mm millimeter millimetre", "metre", Fraction(1, 1000)),
        ("in inch inche", "metre", Fraction(254, 10_000)),
        ("ft foot feet", "metre", Fraction(3048, 10_000)),
        ("yd yard", "metre", Fraction(9144, 10_000)),
        ("mi mile", "metre", Fraction(1_609_344, 1000)),
        ("s sec second", "second", 1),
        ("min minute", "second", 60),
        ("h hr hour", "second", 3600),
        ("day", "second", 86_400),
        ("week", "second", 604_800),
        ("month", "month", 1),
        ("year yr", "month", 12),
        ("g gram", "gram", 1),
        ("mg milligram", "gram", Fraction(1, 1000)),
        ("kg kilogram", "gram", 1000),
        ("lb pound", "pound", 1),
        ("oz ounce", "pound", Fraction(1, 16)),
        ("ton tonne", "ton", 1),
        ("dollar usd", "dollar", 1),
        ("cent", "dollar", Fraction(1, 100)),
        ("euro eur", "euro", 1),
        ("gbp", "sterling", 1),
        ("yen", "yen", 1),
        ("degree deg", "degree", 1),
        ("radian rad", "radian", 1),
        ("degc celsius", "celsius", 1),
        ("degf fahrenheit", "fahrenheit", 1),
        ("unit", "unit", 1),
        ("newton n", "newton", 1),
        ("joule j", "joule", 1),
        ("watt w", "watt", 1),
        ("volt v", "volt", 1),
    ]
    for names, base, factor in rows:
        for name in names.split():
            yield name, (Fraction(factor), base, 1)
    for name in ("l", "liter", "litre"):
        yield name, (Fraction(1, 1000), "metre", 3)
    for name in ("ml", "milliliter", "millilitre"):
        yield name, (Fraction(1, 1_000_000), "metre", 3)


UNITS = dict(_table())
BARE_UNITS = frozenset(name for name in UNITS if len(name) > 1) - {"in", "min", "sec", "deg"}
"""Units that are known without \\text around them; `\\min` and `\\sec` are functions."""
SPEEDS = {"mph": ("mile", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour")}
LARGE = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_OTHERS = """
    half third quarter plus minus times over divided by point root and or to not no e pi than if
    for none undefined infinity infinite impossible factorial base mod modulo more less fewer
    zero one two three four five six seven eight nine ten halves score gross remainder
"""
_PARTS = "third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth millionth"
MAX_WORDS = 16
NO_NOUNS = frozenset(
    [*_OTHERS.split(), *_PARTS.split(), *(f"{part}s" for part in [*_PARTS.split(), "quarter"])]
)
"""Words behind a number that make it another number, or no number: never dropped."""


def read_unit(words: list[str]) -> Unit | None:
    """The unit that words and signs behind a number spell; None where they spell none.

    Args:
        words: lower-case words, each perhaps followed by `^` and an exponent; `/` or `per` between.
    """
    factor, dims, nouns = Fraction(1), dict[str, int](), list[str]()
    percent, sign, large, power, k = False, 1, 1, 1, 0
    if len(words) > MAX_WORDS:
        return None
    while k < len(words):
        word = words[k]
        k += 1
        if word in ("/", "per"):
            sign = -1
            continue
        exponent = 1
        if words[k : k + 1] == ["^"]:
            if words[k + 1 : k + 2] not in ([str(n)] for n in range(1, 7)):
                return None
            exponent, k = int(words[k + 1]), k + 2
        elif words[k : k + 1] and words[k] in ("squared", "cubed"):
            exponent, k = POWERS[words[k]], k + 1
        if word in NO_NOUNS or word in ("^", "-"):
            return None
        if word == "percent":
            percent = True
        elif word in LARGE and not nouns:
            large *= LARGE[word]
        elif word in POWERS:
            power = POWERS[word]
        elif word in SPEEDS:
            for part, s in zip(SPEEDS[word], (1, -1), strict=True):
                factor *= _lay(dims, part, s)
        elif (name := _name(word)) is not None:
            factor *= _lay(dims, name, sign * exponent * power)
            power = 1
        elif exponent == 1 and len(nouns) < 4 and word.isalpha():
            nouns.append(word)
        else:
            return None
    if power != 1:
        return None  # "5 squared", of nothing.
    kept = tuple(sorted((d, e) for d, e in dims.items() if e))
    return Unit(large, factor, kept, tuple(nouns), percent)


def agree(a: Unit, b: Unit) -> bool:
    """Whether two units may stand behind equal numbers: the same kind, or one is not given."""
    if a.is_bare or b.is_bare:
        return True
    if a.dims or b.dims:
        generic = any(name == "unit" for name, _ in (*a.dims, *b.dims))
        return a.dims == b.dims or (generic and bool(a.dims and b.dims))
    return a.nouns[-1].rstrip("s") == b.nouns[-1].rstrip("s")


def _name(word: str) -> str | None:
    if word in UNITS:
        return word
    for ending in ("s", "es"):
        if word.endswith(ending) and word.removesuffix(ending) in UNITS and len(word) > 2:
            return word.removesuffix(ending)
    return None


def _lay(dims: dict[str, int], name: str, exponent: int) -> Fraction:
    factor, base, power = UNITS[name]
    dims[base] = dims.get(base, 0) + power * exponent
    return factor**exponent
