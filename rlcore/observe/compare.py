"""Two runs held against each other: what differs, and from where on.

Stages are compared by what they hold, since two runs that computed the same have different names,
times and attempts in their manifests: rollouts by prompts, tokens and log-probs, scores by rewards,
selections by what they keep, training by the state it ends with (where one did not save it, by its
settings and figures).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlcore.store.batch import read_parts
from rlcore.store.branch import Difference, differences
from rlcore.store.manifest import Manifest, StageRef, canonical_json
from rlcore.store.run_store import RunStore

COMPARED = {
    "rollout": ("prompt_id", "tokens", "rollout_log_probs", "status"),
    "reward": ("row", "reward", "status"),
    "filter": ("row", "reward", "keep"),
}
_TRAIN_FIGURES = ("train/loss", "train/grad_norm", "train/samples", "train/tokens")


@dataclass(frozen=True)
class Parting:
    """The first stage that two runs do not share."""

    iteration: int
    stage: str


@dataclass(frozen=True)
class Comparison:
    """All that `sluice diff` says."""

    settings: list[Difference]
    shared: int
    """Iterations that are one and the same in the store, as forks have them."""
    common: int
    """Iterations that both have committed."""
    parting: Parting | None
    """None: what both have is equal."""


def compare_runs(a: RunStore, b: RunStore) -> Comparison:
    """Hold two runs of one root against each other.

    Raises:
        NotFound: one is not there.
    """
    settings = differences(a.load_run()["config"], b.load_run()["config"])
    ends = [0 if last is None else last + 1 for last in (a.last_committed(), b.last_committed())]
    common = min(ends)
    shared = _shared(a, b, common)
    for i in range(shared, common):
        for stage in (*COMPARED, "train"):
            if not _equal(a, b, i, stage):
                return Comparison(settings, shared, common, Parting(i, stage))
    return Comparison(settings, shared, common, None)


def _shared(a: RunStore, b: RunStore, common: int) -> int:
    """How many iterations both take from one run; ownership only changes once along a run."""
    shared = 0
    for i in _steps(a, b, common):
        if a.owner(i).run_id == b.owner(i).run_id:
            shared = i + 1
    return shared


def _steps(a: RunStore, b: RunStore, common: int) -> Iterator[int]:
    """The last iteration of each stretch that belongs to one run."""
    ends = {s.first_own - 1 for run in (a, b) for s in run.lineage} | {common - 1}
    yield from sorted(end for end in ends if 0 <= end < common)


def _equal(a: RunStore, b: RunStore, i: int, stage: str) -> bool:
    one, other = _manifest(a, i, stage), _manifest(b, i, stage)
    if stage == "train":
        return _train_digest(one, other) == _train_digest(other, one)
    if [f.sha256 for f in one.files] == [f.sha256 for f in other.files]:
        return True
    return _content(a, one) == _content(b, other)


def _content(store: RunStore, manifest: Manifest) -> str:
    table = read_parts(store.objects, manifest.files, COMPARED[manifest.stage])
    return hashlib.sha256(canonical_json(table.to_pydict())).hexdigest()


def _train_digest(manifest: Manifest, other: Manifest) -> Any:
    states = [m.extra.get("state") for m in (manifest, other)]
    if all(states):
        return states[0]["model_sha256"], states[0]["optimizer_sha256"]  # type: ignore[index]
    return manifest.config_digest, [manifest.metrics.get(name) for name in _TRAIN_FIGURES]


def _manifest(store: RunStore, i: int, stage: str) -> Manifest:
    record = store.committed(i)
    assert record is not None
    return store.manifest(StageRef.model_validate(record["stages"][stage]))
