"""Where everything of a run lies: pure functions from names to keys, and nothing else.

Invariants:
- A key is relative to the store's root, uses `/`, and never leaves the root.
- Two executions of one stage never write the same data key, since each carries its own `attempt`.
- The manifest, the lease, `run.json` and `_COMMITTED.json` have fixed keys: whoever knows the
  run's id finds them without listing.
"""

import re
import uuid

from rlcore.errors import NotFound, StoreError

STAGES = ("rollout", "reward", "filter", "train", "weight_sync", "evaluate", "checkpoint")
"""The stages of one iteration in the order in which they depend on one another."""

RUNS = "runs"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STAGE = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


def new_attempt() -> str:
    """A name for one execution of a stage: 32 hex digits, never the same twice."""
    return uuid.uuid4().hex


def run_prefix(run_id: str) -> str:
    """Folder of a run.

    Raises:
        NotFound: the id is no plain folder name, so no run can have it.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise NotFound(
            f"run id {run_id!r} is not usable as a folder name; use letters, digits, '.', '_' and "
            "'-', at most 128, beginning with a letter or digit"
        )
    return f"{RUNS}/{run_id}"


def run_key(run_id: str) -> str:
    """The run's record: config, digest, code version, parent."""
    return f"{run_prefix(run_id)}/run.json"


def lease_key(run_id: str) -> str:
    """Who may commit to the run."""
    return f"{run_prefix(run_id)}/lease.json"


def bad_lease_key(run_id: str, stamp: str) -> str:
    """Where a torn lease goes; `stamp` is a time."""
    return f"{run_prefix(run_id)}/lease.bad-{stamp}.json"


def attempts_key(run_id: str, flow_run_id: str) -> str:
    """How often a flow run was begun at one iteration."""
    return f"{run_prefix(run_id)}/attempts/{flow_run_id}.json"


def driver_key(run_id: str, epoch: int) -> str:
    """Who drove the run in an epoch of its lease, by which code; for people."""
    return f"{run_prefix(run_id)}/drivers/{epoch:06d}.json"


def outcome_key(run_id: str) -> str:
    """How the run's last driver ended; for display only."""
    return f"{run_prefix(run_id)}/outcome.json"


def forks_key(run_id: str) -> str:
    """The runs that go on from an iteration of this one, so that it keeps what they need."""
    return f"{run_prefix(run_id)}/forks.json"


def base_key(run_id: str) -> str:
    """A fork's own copy of the trainer's state that it begins with, where its parent kept none."""
    return f"{run_prefix(run_id)}/base/_STATE.json"


def base_prefix(run_id: str, attempt: str) -> str:
    """Folder of that state."""
    return f"{run_prefix(run_id)}/base/state-{_checked(attempt)}"


def iteration_prefix(run_id: str, iteration: int) -> str:
    """Folder of one iteration, counted from 0."""
    if iteration < 0:
        raise StoreError(
            f"iteration {iteration} of run {run_id} is negative; iterations count from 0"
        )
    return f"{run_prefix(run_id)}/it/{iteration:06d}"


def evaluation_prefix(run_id: str, iteration: int, attempt: str) -> str:
    """Folder of an evaluation that was asked for beside the run: its parts and its manifest."""
    return f"{run_prefix(run_id)}/evals/{iteration:06d}-{_checked(attempt)}"


def model_prefix(run_id: str) -> str:
    """Folder of the starting model, where `model.build` made it."""
    return f"{run_prefix(run_id)}/model"


def model_listing_key(run_id: str) -> str:
    """The list of that folder's files, as JSON; written once they are all there."""
    return f"{model_prefix(run_id)}/_FILES.json"


def committed_key(run_id: str, iteration: int) -> str:
    """The record that ends an iteration."""
    return f"{iteration_prefix(run_id, iteration)}/_COMMITTED.json"


def stage_prefix(run_id: str, iteration: int, stage: str) -> str:
    """Folder of one stage of one iteration."""
    if not _STAGE.fullmatch(stage):
        raise StoreError(
            f"stage {stage!r} is not usable as a folder name; use lower-case letters, digits, '_', "
            "'-'"
        )
    return f"{iteration_prefix(run_id, iteration)}/{stage}"


def manifest_key(run_id: str, iteration: int, stage: str) -> str:
    """The manifest whose presence says that the stage is done."""
    return f"{stage_prefix(run_id, iteration, stage)}/_MANIFEST.json"


def bad_manifest_key(run_id: str, iteration: int, stage: str, stamp: str) -> str:
    """Where a manifest goes whose parts turned out damaged; `stamp` is a time."""
    return f"{stage_prefix(run_id, iteration, stage)}/_MANIFEST.bad-{stamp}.json"


def part_key(run_id: str, iteration: int, stage: str, shard: int, attempt: str) -> str:
    """One Parquet file of a stage, written by one execution of it."""
    return f"{stage_prefix(run_id, iteration, stage)}/part-{shard:05d}-{_checked(attempt)}.parquet"


def state_prefix(run_id: str, iteration: int, attempt: str) -> str:
    """Folder of the trainer state (model, optimizer, schedule, RNG) that an iteration ends with."""
    return f"{stage_prefix(run_id, iteration, 'train')}/state-{_checked(attempt)}"


def buffer_prefix(run_id: str, iteration: int, attempt: str) -> str:
    """Folder of what a rollout began and left to the next one."""
    return f"{stage_prefix(run_id, iteration, 'rollout')}/buffer-{_checked(attempt)}"


def dropped_prefix(run_id: str, iteration: int, attempt: str) -> str:
    """Folder of the groups that a rollout generated, scored and dropped."""
    return f"{stage_prefix(run_id, iteration, 'rollout')}/dropped-{_checked(attempt)}"


def scores_prefix(run_id: str, iteration: int, attempt: str) -> str:
    """Folder of the scores that a rollout chose its groups by."""
    return f"{stage_prefix(run_id, iteration, 'rollout')}/scores-{_checked(attempt)}"


def delta_head_key(run_id: str) -> str:
    """The newest of the versions of weights that lie in the store for far engines."""
    return f"{run_prefix(run_id)}/deltas/HEAD.json"


def delta_prefix(run_id: str, version: str, attempt: str) -> str:
    """Folder of one such version: its record and what changed."""
    return f"{run_prefix(run_id)}/deltas/{_checked(version)}-{_checked(attempt)}"


def pruned_key(prefix: str) -> str:
    """Tombstone of a state folder: its files were removed on purpose."""
    return f"{prefix}/_PRUNED.json"


def _checked(attempt: str) -> str:
    if not _ATTEMPT.fullmatch(attempt):
        raise StoreError(
            f"attempt {attempt!r} is not usable in a file name; take one from new_attempt()"
        )
    return attempt
