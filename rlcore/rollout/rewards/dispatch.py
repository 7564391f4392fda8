"""Which function scores a sample.

In this order: the sample's own `custom_rm_path`; `reward.custom_rm_path`; `rm_type` in the sample's
metadata; `reward.rm_type`. A row may so name a type of its own in a mixed data set.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.errors import PluginError
from rlcore.plugins import Kind, load_checked
from rlcore.rollout.rewards import builtin
from rlcore.rollout.rewards.protocol import NoRewardError
from rlcore.sample import Sample

SETTING = "reward.custom_rm_path"
TYPE_SETTING = "reward.rm_type"
Function = Callable[..., Any]


class Dispatch:
    """Functions by name, loaded once. The one that the settings name is loaded at once.

    Args:
        settings: of the reward section.

    Raises:
        PluginError: that function cannot be loaded or called.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._kind: Kind = "batched_reward" if settings["batched"] else "reward"
        self._known: dict[tuple[str, str], Function | PluginError] = {}
        path, rm_type = settings["custom_rm_path"], settings["rm_type"]
        self._by_path = bool(path)
        self._default = self._get((SETTING, path) if path else (TYPE_SETTING, rm_type))

    def function_of(self, samples: Sequence[Sample]) -> Function:
        """The function for the samples of one call: one sample, or a group.

        Raises:
            PluginError: a function that the samples name cannot be loaded or called.
            NoRewardError: the samples of a group name different ones.
        """
        names = {self._named_by(sample) for sample in samples}
        if len(names) > 1:
            told = ", ".join(sorted(repr(name[1]) if name else "none" for name in names))
            raise NoRewardError(f"the samples of one group name different reward functions: {told}")
        [name] = names
        return self._default if name is None else self._get(name)

    def _named_by(self, sample: Sample) -> tuple[str, str] | None:
        if sample.custom_rm_path:
            return "custom_rm_path of the sample", sample.custom_rm_path
        if self._by_path:
            return None
        rm_type = sample.metadata.get("rm_type")
        return ("rm_type of the sample", str(rm_type)) if rm_type else None

    def _get(self, name: tuple[str, str]) -> Function:
        if name not in self._known:
            try:
                self._known[name] = self._load(*name)
            except PluginError as error:
                # A module that fails is not run again for each of its samples.
                self._known[name] = error
        found = self._known[name]
        if isinstance(found, PluginError):
            raise found
        return found

    def _load(self, where: str, name: str) -> Function:
        if where.startswith(("custom_rm_path", SETTING)):
            return load_checked(name, where, self._kind)
        try:
            return builtin.load(name)
        except PluginError as error:
            raise PluginError(f"{where} = {name!r}: {error}") from None


def function_name(custom_rm_path: str, rm_type: str) -> str:
    """The setting that names the reward function, and what it names, for errors."""
    if custom_rm_path:
        return f"{SETTING} = {custom_rm_path!r}"
    return f"{TYPE_SETTING} = {rm_type!r}"
