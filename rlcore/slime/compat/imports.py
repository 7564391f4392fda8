"""`import slime...`, answered with ours.

Invariants:
- `NAMES` lists all that can be imported; anything else is an ImportError that says what there is.
- `remove` leaves `sys.modules` and `sys.meta_path` as `install` found them.
"""

import difflib
import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from rlcore.sample import Sample, Status

log = logging.getLogger("sluice.plugins")

ROOT = "slime"
GIVEN = "rlcore.slime.compat.provided"
NAMES: dict[str, dict[str, str]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": "rlcore.sample"},
    "slime.utils.async_utils": {"run": GIVEN},
    "slime.utils.http_utils": {"post": GIVEN},
    "slime.utils.misc": {"load_function": GIVEN},
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.cp_utils": {
        "all_gather_with_cp": GIVEN,
        "slice_log_prob_with_cp": GIVEN,
    },
    "slime.rollout": {},
    "slime.rollout.base_types": {"RolloutFnTrainOutput": GIVEN, "RolloutFnEvalOutput": GIVEN},
    "slime.rollout.sglang_rollout": {
        "GenerateState": GIVEN,
        "generate": GIVEN,
        "generate_and_rm": GIVEN,
        "generate_and_rm_group": GIVEN,
    },
    "slime.rollout.sglang_streaming_rollout": {"generate_streaming": GIVEN},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": GIVEN},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": GIVEN,
        "check_reward_nonzero_std_with_fallback": GIVEN,
    },
    "slime.rollout.rm_hub": {"async_rm": GIVEN, "batched_async_rm": GIVEN},
    "slime.rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": GIVEN},
    "slime.rollout.rm_hub.f1": {"f1_score": GIVEN},
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": GIVEN},
    "slime.rollout.rm_hub.math_utils": {"grade_answer_verl": GIVEN},
}
"""Module -> name -> module of ours that has it, under the same name."""


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of `NAMES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:
            return None
        if fullname not in NAMES:
            near = difflib.get_close_matches(fullname, NAMES, n=1)
            hint = f"the nearest is {near[0]}" if near else f"there are {', '.join(NAMES)}"
            raise ModuleNotFoundError(
                f"{fullname} does not exist under compat.slime; {hint} (docs/from-slime.md lists "
                "all)",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        for one, where in NAMES[name].items():
            setattr(module, one, getattr(importlib.import_module(where), one))

        def missing(wanted: str) -> Any:
            if wanted.startswith("__") or f"{name}.{wanted}" in NAMES:
                raise AttributeError(wanted)
            have = ", ".join(NAMES[name]) or "no names"
            raise ImportError(
                f"{name} has no {wanted!r} under compat.slime; it has {have} (docs/from-slime.md)"
            )

        vars(module)["__getattr__"] = missing


_finder = _Finder()
_aside: dict[str, ModuleType] = {}
"""Modules of a real slime that was imported before."""


def install() -> None:
    """Answer `import slime...` with ours from now on."""
    if _finder in sys.meta_path:
        return
    real = PathFinder.find_spec(ROOT)
    if real is not None:
        log.warning("compat.slime = true: plugins get Sluice's names for %s", real.origin or ROOT)
    _aside.update(_take())
    sys.meta_path.insert(0, _finder)
    # slime's enumeration hangs on the class.
    setattr(Sample, "Status", Status)  # noqa: B010


def remove() -> None:
    """Answer it no more."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    _take()
    sys.modules.update(_aside)
    _aside.clear()
    delattr(Sample, "Status")


def _take() -> dict[str, ModuleType]:
    """Modules of the name `slime`, taken out of those that are known."""
    names = [name for name in sys.modules if name.partition(".")[0] == ROOT]
    return {name: sys.modules.pop(name) for name in names}
