"""Whether plugins for slime are served in this process, and with what.

Invariant: importing this costs nothing; all else is imported once it is switched on.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.errors import PluginError

if TYPE_CHECKING:
    from rlcore.rollout.pool import EnginePool

ENGINES_ONLY = ("sglang_router_ip", "sglang_router_port")


@dataclass(frozen=True)
class Serving:
    """What generate and rollout functions are served with, in the process that has engines.

    Attributes:
        loop: in which `pool` lives; None: none ran when it was told.
    """

    pool: "EnginePool"
    tokenizer: Any
    loop: asyncio.AbstractEventLoop | None


_args: dict[str, Any] | None = None
_serving: Serving | None = None
_own: ContextVar[Serving | None] = ContextVar("serving", default=None)
"""The same of the task that runs: an evaluation and what is generated beside it have pools of their
own.
"""


def activate(args: Mapping[str, Any] | None) -> None:
    """Serve plugins for slime from now on; None: do not.

    Args:
        args: of `attributes.slime_args`.
    """
    global _args, _serving
    from rlcore.slime.compat import imports

    if args is None:
        _args = _serving = None
        imports.remove()
        return
    _args = dict(args)
    imports.install()


@contextmanager
def active(args: Mapping[str, Any] | None) -> Iterator[None]:
    """`activate` for a while."""
    before = _args
    if args is None and before is None:
        yield
        return
    activate(args)
    try:
        yield
    finally:
        activate(before)


def current() -> dict[str, Any] | None:
    """slime's `args`, by name; None: plugins for slime are not served."""
    return _args


def attribute(name: str) -> Any:
    """An attribute of slime's `args`.

    Raises:
        AttributeError: naming why it is not there, and the nearest setting.
    """
    known = _args or {}
    if name in known and name not in ENGINES_ONLY:
        return known[name]
    if name in ENGINES_ONLY:
        if _serving is None:
            raise AttributeError(f"args.{name} is there where engines are: in generate functions")
        host, _, port = _serving.pool.address.rpartition("//")[2].rpartition(":")
        return host if name == ENGINES_ONLY[0] else int(port)
    from rlcore.slime.compat.attributes import why_missing

    raise AttributeError(f"args has no {name!r}: {why_missing(name, known)}")


def serve(pool: "EnginePool", tokenizer: Any) -> None:
    """Tell what generate functions are served with; of no effect while switched off."""
    global _serving
    if _args is None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    _serving = Serving(pool, tokenizer, loop)
    _own.set(_serving)


def found() -> Serving | None:
    """What this task is served with, or else the process; None: nothing is."""
    return None if _serving is None else _own.get() or _serving


def serving() -> Serving:
    """What generate functions are served with.

    Raises:
        PluginError: this process has no engines.
    """
    here = found()
    if here is None:
        raise PluginError(
            "a plugin asks for engines where there are none: generate and rollout functions have "
            "them, rewards and filters do not"
        )
    return here
