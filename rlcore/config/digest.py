"""Digests of a configuration: equal digests mean that the same thing would be computed.

Where a run is stored, how long things may take and how many processes help are no part of a digest,
so a run can move to another machine and go on.
"""

import hashlib
import json
from typing import Any

from rlcore.config.tree import RunConfig, Section

NOT_COMPUTED = frozenset({"storage", "cluster"})


def config_digest(config: RunConfig, *sections: str) -> str:
    """SHA-256 over the named sections, or over all that change what a run computes.

    `train.num_iterations` counts only where the learning-rate schedule depends on it, so a run with
    a constant rate can be made longer.
    """
    names = sections or tuple(n for n in RunConfig.model_fields if n not in NOT_COMPUTED)
    tree: dict[str, Any] = {}
    for name in names:
        value = getattr(config, name)
        tree[name] = _computed(value) if isinstance(value, Section) else value
    if "train" in tree and config.train.lr_schedule == "constant":
        tree["train"].pop("num_iterations")
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _computed(section: Section) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude=set(section.OPERATIONAL))
