"""Sampling parameters of a request, checked the way SGLang checks them.

Invariant: a `SamplingParams` that exists is valid; everything wrong is an `EngineError` that names
the parameter, its value and what is allowed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlcore.errors import EngineError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are SGLang's."""

    max_new_tokens: int | None = 128
    """None: up to the context length."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    sampling_seed: int | None = None
    ignore_eos: bool = False
    """True: neither end-of-sequence nor `stop_token_ids` ends the request."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on what was generated before."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineError(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"{name} must be an integer, got {value!r}.")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise EngineError(f"{name} must be true or false, got {value!r}.")
    return value


def _temperature(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineError(f"{name} must be a non-negative finite number, got {value!r}.")
    if not math.isfinite(value) or value < 0:
        raise EngineError(f"{name} must be a non-negative finite number, got {value}.")
    # As in SGLang: what is below this cannot be told from greedy and would overflow the logits.
    return 0.0 if value < 1e-6 else float(value)


def _within(low: float, high: float, *, open_low: bool = False) -> Callable[[str, object], float]:
    def check(name: str, value: object) -> float:
        number = _number(name, value)
        if number > high or number < low or (open_low and number == low):
            bracket = "(" if open_low else "["
            raise EngineError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value}.")
        return number

    return check


def _top_k(name: str, value: object) -> int:
    number = _integer(name, value)
    if number != -1 and number < 1:
        raise EngineError(f"{name} must be -1 (disable) or at least 1, got {value}.")
    return number


def _at_least(low: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        number = _integer(name, value)
        if number < low:
            raise EngineError(f"{name} must be at least {low}, got {value}.")
        return number

    return check


def _optional_count(name: str, value: object) -> int | None:
    return None if value is None else _at_least(0)(name, value)


def _stop(name: str, value: object) -> tuple[str, ...]:
    values = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(s, str) and s for s in values):
        raise EngineError(f"{name} must be a non-empty string or a list of them, got {value!r}.")
    return tuple(values)


def _stop_token_ids(name: str, value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not isinstance(value, list | tuple):
        raise EngineError(f"{name} must be a list of token ids, got {value!r}.")
    return frozenset(_integer(name, item) for item in value)


def _seed(name: str, value: object) -> int | None:
    return None if value is None else _integer(name, value)


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_new_tokens": _optional_count,
    "min_new_tokens": _at_least(0),
    "temperature": _temperature,
    "top_p": _within(0, 1, open_low=True),
    "top_k": _top_k,
    "min_p": _within(0, 1),
    "frequency_penalty": _within(-2, 2),
    "presence_penalty": _within(-2, 2),
    "repetition_penalty": _within(0, 2, open_low=True),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "sampling_seed": _seed,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "no_stop_trim": _flag,
    "n": _at_least(1),
}

_NOT_OFFERED = frozenset(
    ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params",
     "stream_interval")
)  # fmt: skip
"""SGLang's parameters that this engine lacks: null is taken, anything else refused."""


def parse_sampling_params(raw: object) -> SamplingParams:
    """The checked parameters of a request's `sampling_params`; EngineError names what is wrong."""
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, Mapping):
        raise EngineError(f"sampling_params must be an object, got {type(raw).__name__}.")
    values: dict[str, object] = {}
    for name, value in raw.items():
        check = _CHECKS.get(name)
        if check is not None:
            values[name] = check(name, value)
        elif name not in _NOT_OFFERED:
            raise EngineError(
                f"Unexpected sampling parameter '{name}'; known ones are {', '.join(_CHECKS)}."
            )
        elif value is not None:
            raise EngineError(f"Sampling parameter '{name}' is not offered by this engine.")
    params = SamplingParams(**values)  # type: ignore[arg-type]  # each was checked by its own rule
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise EngineError(
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], "
            f"got {params.min_new_tokens}."
        )
    return params
