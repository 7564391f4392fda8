"""What may become of an argument of slime."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Takes = Literal["flag", "switch", "int", "float", "str", "json", "ints", "strs", "again"]
"""A `flag` takes no value; a `switch` neither, and has a `--no-` form; a list one or more. What may
come `again` takes one each time."""


def same(value: Any) -> Any:
    """The value as it is."""
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """It is a setting of the configuration."""

    key: str
    convert: Callable[[Any], Any] = same

    def __str__(self) -> str:
        return f"`{self.key}`"


@dataclass(frozen=True, slots=True)
class Joined:
    """It becomes settings together with other arguments, in `translate`."""

    keys: str
    how: str = ""

    def __str__(self) -> str:
        names = ", ".join(f"`{key}`" for key in self.keys.split())
        return f"{names}{': ' + self.how if self.how else ''}"


@dataclass(frozen=True, slots=True)
class Held:
    """What it asks for is so here anyway."""

    why: str
    only: tuple[Any, ...] = ()
    """Values that are so; others are refused. Empty: all."""

    def __str__(self) -> str:
        values = " or ".join(f"`{value}`" for value in self.only)
        return f"so anyway{f' (with {values})' if values else ''}: {self.why}"


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no such thing here."""

    why: str
    """Why, and the nearest thing."""

    def __str__(self) -> str:
        return f"refused: {self.why}"


Rule = Setting | Joined | Held | Refused


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of slime."""

    name: str
    """Without its dashes."""
    takes: Takes
    rule: Rule


def flag(name: str, rule: Rule) -> Argument:
    """An argument without a value."""
    return Argument(name, "flag", rule)
