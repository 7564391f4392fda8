"""Exact arithmetic on what an answer may hold: fractions, roots, constants, letters, functions.

A value is a quotient of two sums. A term of a sum is a fraction times powers of atoms: letters,
constants, calls that are not worked out, and primes with an exponent between 0 and 1. Distinct
products of such powers of primes are linearly independent over the rationals (Besicovitch 1940), so
a difference of radicals is zero exactly where no term is left.

Invariants:
- Nothing is rounded; floats never appear.
- Size is bounded: a number of more than `MAX_BITS` bits, or a sum of more than `MAX_TERMS` terms,
  is never made. What would need one stays a power that is not worked out, or is `UnreadableError`.
"""

from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, gcd, isqrt, lcm
from typing import NamedTuple

Monomial = tuple[tuple[str, Fraction], ...]
"""Powers of atoms, sorted by atom; empty for a plain number."""
Sum = dict[Monomial, Fraction]

MAX_BITS = 8_000
MAX_TERMS = 300
MAX_PRODUCTS = 5_000
MAX_POWER = 40
"""Largest power to which a sum of several terms is multiplied out."""
MAX_ROOT = 12
TRIAL_LIMIT = 2_000
"""Primes below this are divided out of numbers under roots and logarithms."""
ONE: Monomial = ()
UNIT: Sum = {ONE: Fraction(1)}
"""What most values are divided by. Sums are never changed once they are made."""
PRIME = "p:"
IMAGINARY = "i"
POSITIVE = (PRIME, "c:", "x:")
"""Beginnings of atoms that stand for positive numbers, whose roots may be taken one by one."""


class UnreadableError(Exception):
    """A text that is no expression, or one too large to work out."""


class Value(NamedTuple):
    """A quotient of sums. The lower one is never zero."""

    num: Sum
    den: Sum


def number(value: Fraction | int) -> Value:
    """A rational number."""
    return Value(_clean({ONE: Fraction(value)}), UNIT)


def atom(name: str) -> Value:
    """A letter, a constant, or a call that is not worked out."""
    return Value({((name, Fraction(1)),): Fraction(1)}, UNIT)


def rational(value: Value) -> Fraction | None:
    """The number that a value is, where it is rational."""
    if not set(value.num) | set(value.den) <= {ONE}:
        return None
    return value.num.get(ONE, Fraction(0)) / value.den[ONE]


def add(a: Value, b: Value) -> Value:
    """a + b."""
    if a.den == b.den:
        num = _add(a.num, b.num)
        return Value(num, UNIT) if a.den is UNIT else _value(num, a.den)
    num = _add(_multiply(a.num, b.den), _multiply(b.num, a.den))
    return _value(num, _multiply(a.den, b.den))


def negative(a: Value) -> Value:
    """-a."""
    return Value({m: -c for m, c in a.num.items()}, a.den)


def multiply(a: Value, b: Value) -> Value:
    """a b."""
    if a.den is UNIT and b.den is UNIT:
        return Value(_multiply(a.num, b.num), UNIT)
    return _value(_multiply(a.num, b.num), _multiply(a.den, b.den))


def divide(a: Value, b: Value) -> Value:
    """a / b.

    Raises:
        UnreadableError: b is zero.
    """
    if not b.num:
        raise UnreadableError("a division by zero")
    return _value(_multiply(a.num, b.den), _multiply(a.den, b.num))


def equal(a: Value, b: Value) -> bool:
    """Whether a - b is zero.

    Raises:
        UnreadableError: too large to tell.
    """
    if a == b:
        return True
    return _multiply(a.num, b.den) == _multiply(b.num, a.den)


def ratio(a: Value, b: Value) -> Fraction | None:
    """The rational number a / b, where it is one and neither is zero."""
    left, right = _multiply(a.num, b.den), _multiply(b.num, a.den)
    if not left or left.keys() != right.keys():
        return None
    [first, *others] = {left[m] / right[m] for m in left}
    return None if others else first


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent.

    Raises:
        UnreadableError: it is undefined, or too large.
    """
    n = rational(exponent)
    if n is None:
        return _symbolic_power(base, exponent)
    if not base.num:
        if n <= 0:
            raise UnreadableError("zero to a power that is not positive")
        return base
    if n.denominator == 1:
        return _integer_power(base, int(n))
    if n.denominator > MAX_ROOT:
        return _symbolic_power(base, exponent)
    return divide(_root(base.num, n), _root(base.den, n))


def call(name: str, *arguments: Value) -> Value:
    """A function that is not worked out: two calls are equal where name and arguments are."""
    return atom(f"f:{name}({','.join(map(text_of, arguments))})")


def logarithm(name: str, a: Value) -> Value:
    """The logarithm `ln` or `log` of a; of a positive fraction, in those of its primes."""
    n = rational(a)
    if n is None or n <= 0:
        if a == atom("c:e") and name == "ln":
            return number(1)
        return call(name, a)
    out: Sum = {}
    for prime, exponent in factors(n).items():
        # log 10 = 1 is what its name means, so log 5 is told by log 2.
        if name == "log" and prime == 5:
            out = _add(out, {ONE: Fraction(exponent)})
            out = _add(out, {((f"f:{name}(2)", Fraction(1)),): Fraction(-exponent)})
        else:
            out = _add(out, {((f"f:{name}({prime})", Fraction(1)),): Fraction(exponent)})
    return Value(out, UNIT)


def whole_function(name: str, *arguments: Value) -> Value:
    """`factorial` or `binomial` of small whole numbers; other calls are not worked out."""
    numbers = [rational(a) for a in arguments]
    whole = [int(n) for n in numbers if n is not None and n.denominator == 1 and 0 <= n <= 500]
    if len(whole) < len(numbers):
        return call(name, *arguments)
    return number(factorial(whole[0]) if name == "factorial" else comb(*whole))


def text_of(value: Value) -> str:
    """A name for a value that is the same for values written in different orders."""
    num, den = _text(value.num), _text(value.den)
    return num if den == "1" else f"({num})/({den})"


@lru_cache(maxsize=4096)
def _factors_of(n: int) -> tuple[tuple[int, int], ...]:
    found: dict[int, int] = {}
    p = 2
    while p * p <= n and p < TRIAL_LIMIT:
        while n % p == 0:
            n //= p
            found[p] = found.get(p, 0) + 1
        p += 1 if p == 2 else 2
    # What is left has no small divisor; a square is still told from the rest.
    if n > 1 and (root := isqrt(n)) ** 2 == n:
        found[root] = found.get(root, 0) + 2
    elif n > 1:
        found[n] = found.get(n, 0) + 1
    return tuple(found.items())


def factors(n: Fraction) -> dict[int, int]:
    """Prime factors of a positive fraction with their exponents.

    A factor without a divisor below `TRIAL_LIMIT` counts as prime: two ways to write a root of a
    very large number may then look different, never two different roots alike.
    """
    if max(n.numerator, n.denominator).bit_length() > 256:
        raise UnreadableError("a number too large to factor")
    out = dict(_factors_of(n.numerator))
    for prime, exponent in _factors_of(n.denominator):
        out[prime] = out.get(prime, 0) - exponent
    return out


# --- sums -----------------------------------------------------------------------------------------


def _clean(terms: Sum) -> Sum:
    return {m: c for m, c in terms.items() if c}


def _add(a: Sum, b: Sum) -> Sum:
    out = dict(a)
    for monomial, c in b.items():
        out[monomial] = out.get(monomial, Fraction(0)) + c
    return _check(_clean(out))


def _multiply(a: Sum, b: Sum) -> Sum:
    if len(a) * len(b) > MAX_PRODUCTS:
        raise UnreadableError("too many terms")
    out: Sum = {}
    for m, c in a.items():
        for n, d in b.items():
            monomial, factor = _join(m, n)
            out[monomial] = out.get(monomial, Fraction(0)) + c * d * factor
    return _check(_clean(out))


def _check(terms: Sum) -> Sum:
    if len(terms) > MAX_TERMS:
        raise UnreadableError("too many terms")
    for c in terms.values():
        if max(c.numerator.bit_length(), c.denominator.bit_length()) > MAX_BITS:
            raise UnreadableError("a number too large")
    return terms


def _join(m: Monomial, n: Monomial) -> tuple[Monomial, Fraction]:
    """Product of two monomials: what is left of it, and the number that came out."""
    if not m or not n:
        return m or n, Fraction(1)
    exponents = dict(m)
    for name, e in n:
        exponents[name] = exponents.get(name, Fraction(0)) + e
    return _reduced(exponents)


def _reduced(exponents: dict[str, Fraction]) -> tuple[Monomial, Fraction]:
    factor = Fraction(1)
    for name, e in list(exponents.items()):
        if name.startswith(PRIME):
            whole = e.numerator // e.denominator
            prime = int(name[len(PRIME) :])
            if abs(whole) * prime.bit_length() > MAX_BITS:
                raise UnreadableError("a number too large")
            factor *= Fraction(prime) ** whole
            exponents[name] = e - whole
        elif name == IMAGINARY and e.denominator == 1:
            factor *= -1 if int(e) % 4 >= 2 else 1
            exponents[name] = Fraction(int(e) % 2)
    return tuple(sorted((name, e) for name, e in exponents.items() if e)), factor


def _value(num: Sum, den: Sum) -> Value:
    """A quotient in a form that is as plain as it can be without dividing sums."""
    if not den:
        raise UnreadableError("a division by zero")
    if not num:
        return number(0)
    if den == UNIT:
        return Value(num, UNIT)
    if len(den) == 1:
        [(monomial, c)] = den.items()
        inverse, factor = _reduced({name: -e for name, e in monomial})
        return Value(_multiply(num, {inverse: factor / c}), UNIT)
    scale = den[min(den)]
    return Value(
        {m: c / scale for m, c in num.items()}, _check({m: c / scale for m, c in den.items()})
    )


def _text(terms: Sum) -> str:
    parts = []
    for monomial, c in sorted(terms.items()):
        powers = [name if e == 1 else f"{name}^{e}" for name, e in monomial]
        parts.append("*".join(([str(c)] if c != 1 or not powers else []) + powers))
    out = "+".join(parts) or "0"
    if len(out) > 8 * MAX_TERMS:
        raise UnreadableError("an argument too long")
    return out


# --- powers ---------------------------------------------------------------------------------------


def _integer_power(base: Value, n: int) -> Value:
    if n < 0:
        base, n = _value(base.den, base.num), -n
    if len(base.num) == 1 and len(base.den) == 1:
        [(monomial, c)] = base.num.items()
        bits = max(c.numerator.bit_length(), c.denominator.bit_length())
        if abs(c) != 1 and bits * n > MAX_BITS:
            if c < 0 or monomial:
                raise UnreadableError("a number too large")
            return _symbolic_power(base, number(n))
        joined, factor = _reduced({name: e * n for name, e in monomial})
        return Value({joined: c**n * factor}, UNIT)
    if n > MAX_POWER:
        raise UnreadableError("a power too large")
    out = number(1)
    for _ in range(n):
        out = multiply(out, base)
    return out


def _root(terms: Sum, n: Fraction) -> Value:
    """A sum to a power that is not whole: taken apart as far as that is right for real numbers."""
    if terms == UNIT:
        return number(1)
    content = _content(terms)
    inner = {m: c / content for m, c in terms.items()}
    out = _root_of_number(content, n)
    if len(inner) > 1:
        inner_value = Value(inner, UNIT)
        return multiply(out, Value({((f"w:{text_of(inner_value)}", n),): Fraction(1)}, UNIT))
    [(monomial, sign)] = inner.items()
    if sign < 0:
        # Of a negative number: i times a square root, and the real one of odd roots.
        if n.denominator % 2 == 1:
            out = negative(out) if n.numerator % 2 else out
        elif n.denominator == 2:
            out = multiply(out, _integer_power(atom(IMAGINARY), n.numerator % 4))
        else:
            raise UnreadableError("an even root of a negative number")
    powers: dict[str, Fraction] = {}
    hidden = []
    for name, e in monomial:
        if name.startswith(POSITIVE) or (e == 1 and name != IMAGINARY):
            powers[name] = e * n
        else:
            hidden.append((name, e))
    if hidden:
        name = f"w:{text_of(Value({tuple(hidden): Fraction(1)}, UNIT))}"
        powers[name] = powers.get(name, Fraction(0)) + n
    joined, factor = _reduced(powers)
    return multiply(out, Value({joined: factor}, UNIT))


def _content(terms: Sum) -> Fraction:
    """The largest positive fraction that all coefficients are whole multiples of."""
    num, den = 0, 1
    for c in terms.values():
        num, den = gcd(num, abs(c.numerator)), lcm(den, c.denominator)
    return Fraction(num, den)


def _root_of_number(value: Fraction, n: Fraction) -> Value:
    powers = {f"{PRIME}{prime}": e * n for prime, e in factors(value).items()}
    joined, factor = _reduced(powers)
    return Value({joined: factor}, UNIT)


def _symbolic_power(base: Value, exponent: Value) -> Value:
    """base ** exponent with letters above, or with a number above that is too large.

    A sum above is taken apart, and so is a number below: 4^(n+1) and 4 * 2^(2n) are the same.
    """
    if not base.num:
        raise UnreadableError("zero to a power that is not known")
    n = rational(base)
    if n is not None and n > 0:
        bases = {str(prime): Fraction(e) for prime, e in factors(n).items()}
    else:
        bases = {text_of(base): Fraction(1)}
    if exponent.den != UNIT:
        bases_text = text_of(exponent)
        powers = {f"x:{name}^({bases_text})": e for name, e in bases.items()}
        return Value({tuple(sorted(powers.items())): Fraction(1)}, UNIT)
    out, powers = number(1), {}
    for monomial, c in exponent.num.items():
        if monomial == ONE and c.denominator == 1 and abs(c) < MAX_POWER:
            out = power(base, number(c))
            continue
        above = _text({monomial: Fraction(1)})
        powers |= {f"x:{name}^({above})": e * c for name, e in bases.items()}
    return multiply(out, Value({tuple(sorted(powers.items())): Fraction(1)}, UNIT))
