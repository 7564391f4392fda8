r"""Reads an expression, in LaTeX or as a calculator takes it, into an exact value.

Invariants:
- Brackets nest at most `MAX_DEPTH` deep.
- What is no expression is an `UnreadableError`; nothing in it is skipped.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from math import gcd

from rlcore.rollout.rewards.builtin import values
from rlcore.rollout.rewards.builtin.text import Token
from rlcore.rollout.rewards.builtin.values import UnreadableError, Value, atom, number

MAX_DEPTH = 80
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}


def _commands(names: str) -> frozenset[str]:
    return frozenset(rf"\{name}" for name in names.split())


_CALLS = _commands("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh det")
_SYMBOLS = {
    r"\pi": "c:pi",
    r"\infty": "infinity",
    r"\emptyset": "empty",
    r"\varnothing": "empty",
}
_LETTERS = _commands(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
    "rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi "
    "Omega ell"
)
_DECORATED = _commands("vec overline bar hat overrightarrow tilde")
_TIMES = frozenset(["*", r"\cdot", r"\times"])


def evaluate(tokens: list[Token]) -> Value:
    """The value of an expression.

    Raises:
        UnreadableError: it is none, or too large to work out.
    """
    reader = _Reader(tokens)
    value = reader.sum()
    if reader.peek() is not None:
        raise UnreadableError(f"{reader.peek()!r} was not expected")
    return value


def is_plain_number(tokens: list[Token]) -> bool:
    """Whether an expression is a number written out.

    Integers, decimals, fractions and mixed numbers in lowest terms, and powers of ten are. Sums,
    products, other powers, roots and fractions that can be reduced are not: they leave work to do.
    """
    while len(tokens) > 2 and _CLOSING.get(tokens[0].text) == tokens[-1].text:
        if not _wraps(tokens):
            return False
        tokens = tokens[1:-1]
    text = "".join(token.text for token in tokens)
    if _POWER_OF_TEN.fullmatch(text) or _NUMBER.fullmatch(text):
        return True
    match = _FRACTION.fullmatch(text) or _QUOTIENT.fullmatch(text)
    if match is None:
        return False
    above, below = int(match["above"]), int(match["below"])
    mixed = match.groupdict().get("whole")
    return gcd(above, below) == 1 and (not mixed or 0 < above < below)


def _wraps(tokens: list[Token]) -> bool:
    """Whether the first bracket is closed by the last token, and not before."""
    depth = 0
    for token in tokens[:-1]:
        depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        if depth == 0:
            return False
    return True


_SIGN = r"[+-]?"
_NUMBER = re.compile(rf"{_SIGN}(?:\d+\.?\d*|\.\d+)(?:[eE]{_SIGN}\d+)?(?:\\overline\{{\d+\}})?")
_POWER_OF_TEN = re.compile(
    rf"{_SIGN}(?:(?:\d+\.?\d*|\.\d+)(?:\\times|\\cdot|\*))?10\^(?:\{{{_SIGN}\d+\}}|{_SIGN}\d+|"
    rf"\({_SIGN}\d+\))"
)
_FRACTION = re.compile(
    rf"{_SIGN}(?P<whole>\d+)?\\frac(?:\{{(?P<_a>{_SIGN})(?P<above>\d+)\}}\{{(?P<below>\d+)\}})"
)
_QUOTIENT = re.compile(rf"{_SIGN}\(?{_SIGN}(?P<above>\d+)\)?/\(?(?P<below>\d+)\)?")


class _Reader:
    """Recursive descent over tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def peek(self, ahead: int = 0) -> str | None:
        """The text of a coming token; None at the end."""
        k = self._at + ahead
        return self._tokens[k].text if k < len(self._tokens) else None

    def sum(self) -> Value:
        """Terms with + and - between them."""
        value = self._term()
        while (sign := self.peek()) in ("+", "-"):
            self._at += 1
            term = self._term()
            value = values.add(value, values.negative(term) if sign == "-" else term)
        return value

    def _term(self) -> Value:
        value = self._signed()
        while True:
            sign = self.peek()
            if sign in _TIMES:
                self._at += 1
                value = values.multiply(value, self._signed())
            elif sign in ("/", ":"):
                self._at += 1
                value = values.divide(value, self._signed())
            elif self._starts_factor():
                value = values.multiply(value, self._power())
            else:
                return value

    def _signed(self) -> Value:
        minus = False
        while (sign := self.peek()) in ("+", "-"):
            minus ^= sign == "-"
            self._at += 1
        value = self._power()
        return values.negative(value) if minus else value

    def _starts_factor(self) -> bool:
        if self._at >= len(self._tokens):
            return False
        token = self._tokens[self._at]
        if token.kind == "number":
            # "2 3" is no product that anybody writes.
            return self._tokens[self._at - 1].kind != "number"
        if token.kind == "sign":
            return token.text in "([{"
        return token.kind == "letter" or (
            token.kind == "command" and token.text not in (r"\}", r"\|")
        )

    def _power(self) -> Value:
        base = self._factor()
        while self.peek() == "!":
            self._at += 1
            base = values.whole_function("factorial", base)
        if self.peek() != "^":
            return base
        self._at += 1
        # Towers are read from the right, as they are meant.
        self._down(1)
        exponent = self._signed()
        self._down(-1)
        return values.power(base, exponent)

    def _down(self, step: int) -> None:
        self._depth += step
        if self._depth > MAX_DEPTH:
            raise UnreadableError("nested too deep")

    def _factor(self) -> Value:
        self._down(1)
        value = self._inner_factor()
        self._down(-1)
        return value

    def _inner_factor(self) -> Value:
        if self._at >= len(self._tokens):
            raise UnreadableError("the expression ends too early")
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "number":
            return self._number(text)
        if kind == "letter":
            return self._letter(text)
        if kind == "sign" and text in _CLOSING:
            return self._closed(_CLOSING[text])
        if text == "|":
            return values.call("abs", self._closed("|"))
        if kind == "command":
            return self._command(text)
        raise UnreadableError(f"{text!r} was not expected")

    def _closed(self, closing: str) -> Value:
        value = self.sum()
        self._expect(closing)
        return value

    def _expect(self, text: str) -> None:
        if self.peek() != text:
            raise UnreadableError(f"{text!r} is missing")
        self._at += 1

    def _number(self, text: str) -> Value:
        value = decimal(text)
        if self.peek() == r"\overline" and "e" not in text.lower() and "." in text:
            repeated = self._tokens[self._at + 2 : self._at + 3]
            if self.peek(1) == "{" and self.peek(3) == "}" and repeated[0].text.isdigit():
                self._at += 4
                places = len(text.partition(".")[2])
                period = Fraction(int(repeated[0].text), 10 ** len(repeated[0].text) - 1)
                return number(value + period / 10**places)
        if self.peek() == r"\frac" and text.isdigit():
            part, after = self._mixed_part()
            if part is not None:
                self._at = after
                return number(value + part)
        return number(value)

    def _mixed_part(self) -> tuple[Fraction | None, int]:
        """The fraction of a mixed number that begins here, and where it ends."""
        texts = [self.peek(k) or "" for k in range(7)]
        if texts[1] + texts[3] + texts[4] + texts[6] != "{}{}":
            return None, 0
        above, below = texts[2], texts[5]
        if not (above.isdigit() and below.isdigit()) or not 0 < int(above) < int(below):
            return None, 0
        return Fraction(int(above), int(below)), self._at + 7

    def _letter(self, name: str) -> Value:
        if self.peek() == "_":
            self._at += 1
            return atom(f"v:{name}_{self._raw()}")
        if name == "i":
            return atom(values.IMAGINARY)
        if name == "e":
            return atom("c:e")
        if self.peek() == "(" and name in "fg":
            self._at += 1
            return values.call(name, self._closed(")"))
        return atom(f"v:{name}")

    def _raw(self) -> str:
        """A subscript or superscript as it stands, without its braces."""
        if self.peek() != "{":
            text = self.peek()
            if text is None:
                raise UnreadableError("an index is missing")
            self._at += 1
            return text
        end = self._at
        while end < len(self._tokens) and self._tokens[end].text != "}":
            end += 1
        text = "".join(token.text for token in self._tokens[self._at + 1 : end])
        self._at = end
        self._expect("}")
        return text

    def _argument(self) -> Value:
        """What follows a command: a group in braces, or one token, of a number one digit."""
        if self.peek() == "{":
            self._at += 1
            return self._closed("}")
        if self._at < len(self._tokens) and self._tokens[self._at].kind == "number":
            text = self._tokens[self._at].text
            if len(text) > 1 and text.isdigit():
                self._tokens[self._at] = Token("number", text[1:])
                return number(int(text[0]))
        return self._factor()

    def _command(self, name: str) -> Value:
        if name in _SYMBOLS:
            return atom(_SYMBOLS[name])
        if name in _LETTERS:
            return self._letter(name)
        if (read := _COMMANDS.get(name)) is not None:
            return read(self)
        if name in _CALLS:
            return self._call(name)
        if name in _DECORATED:
            return values.call(name, self._argument())
        raise UnreadableError(f"{name} is not known")

    def _fraction(self) -> Value:
        above = self._argument()
        return values.divide(above, self._argument())

    def _square_root(self) -> Value:
        degree = number(2)
        if self.peek() == "[":
            self._at += 1
            degree = self._closed("]")
        # Of a number all digits: "sqrt 12" is not "sqrt(1) 2".
        inside = self._factor()
        if degree == number(2) or values.rational(degree):
            return values.power(inside, values.divide(number(1), degree))
        return values.call("root", inside, degree)

    def _binomial(self) -> Value:
        above = self._argument()
        return values.whole_function("binomial", above, self._argument())

    def _logarithm(self, name: str) -> Value:
        base = None
        if self.peek() == "_":
            self._at += 1
            base = self._argument()
        inside = self._operand()
        if base is None:
            return values.logarithm(name, inside)
        return values.divide(values.logarithm("ln", inside), values.logarithm("ln", base))

    def _operand(self) -> Value:
        """What a function without brackets applies to: "ln 2", "sin 2x", but not "+ 1" behind."""
        if self.peek() in ("(", "[", "{", "|"):
            return self._power()
        value = self._power()
        while self._starts_factor() and self._tokens[self._at].text not in ("(", "["):
            token = self._tokens[self._at]
            if token.kind == "command" and (token.text in _CALLS or token.text in _COMMANDS):
                break
            value = values.multiply(value, self._power())
        return value

    def _call(self, name: str) -> Value:
        exponent = None
        if self.peek() == "^":
            self._at += 1
            exponent = self._argument() if self.peek() == "{" else self._signed()
        value = values.call(name, self._operand())
        return value if exponent is None else values.power(value, exponent)

    def _between(self, name: str, closing: str) -> Value:
        return values.call(name, self._closed(closing))


def decimal(text: str) -> Fraction:
    """A number as it is written, exactly.

    Raises:
        UnreadableError: its exponent is too large.
    """
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent[:8])) * 4 > values.MAX_BITS:
        raise UnreadableError("an exponent too large")
    return Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0)


_COMMANDS: dict[str, Callable[[_Reader], Value]] = {
    r"\frac": _Reader._fraction,
    r"\sqrt": _Reader._square_root,
    r"\binom": _Reader._binomial,
    r"\ln": lambda reader: reader._logarithm("ln"),
    r"\log": lambda reader: reader._logarithm("log"),
    r"\exp": lambda reader: values.power(atom("c:e"), reader._operand()),
    r"\{": lambda reader: reader._closed(r"\}"),
    r"\lfloor": lambda reader: reader._between("floor", r"\rfloor"),
    r"\lceil": lambda reader: reader._between("ceil", r"\rceil"),
    r"\lvert": lambda reader: reader._between("abs", r"\rvert"),
}
