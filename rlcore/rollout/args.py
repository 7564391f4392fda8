"""What custom functions get as `args`: the settings of their part as attributes, and no more.

The whole configuration is not handed over, so a function's result can depend only on what the
stage's digest covers.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from rlcore.slime.compat import state as slime


class PluginArgs:
    """Settings as read-only attributes. An unknown one is an error that names the nearest.

    With `compat.slime` those of slime's `args` are there too, behind the part's own.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.__dict__["_settings"] = dict(settings)

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("_settings", {})
        if name in settings:
            return settings[name]
        if name.startswith("__"):
            raise AttributeError(name)
        if slime.current() is not None:
            return slime.attribute(name)
        near = difflib.get_close_matches(name, settings, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(settings))}"
        raise AttributeError(f"args has no setting {name!r}; {hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name} cannot be set: settings are read-only")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__dict__["_settings"]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(self.__dict__['_settings']))})"
