"""Removal of what nobody needs: files that no manifest names, states beyond those that are kept.

Invariants:
- What any manifest of any run names stays, and so does the state that a fork begins with. The
  manifests of all runs are read first, since forks name files of their parents.
- A run that is driven now is left alone, and so is a file younger than the grace period: it may
  belong to an attempt that is about to commit it.
- Where a run cannot be read, nothing goes of what it might name.
- A dry run finds exactly what the real one would remove.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rlcore.errors import Conflict, NotFound, StoreError
from rlcore.store import paths
from rlcore.store.branch import base_files, drop_fork, forks_of
from rlcore.store.deltas import delta_keys
from rlcore.store.lease import Lease, held_by, may_be_held, read_lease
from rlcore.store.manifest import FileRef, Manifest
from rlcore.store.objects import Objects
from rlcore.store.retention import remove_folder
from rlcore.store.run_store import RunStore, run_ids

GRACE_S = 3600.0
"""Age in seconds from which a file that nothing names is nobody's."""
OLDER_THAN_DAYS = 7.0
"""Age in days from which a quarantined manifest is removed."""
_READERS = 16
_FOLDERS = {"train": "state", "checkpoint": "checkpoint"}


@dataclass(frozen=True)
class Removal:
    """One thing that was removed, or would be."""

    kind: str
    """orphan, scratch, quarantined, state, checkpoint or run."""
    run_id: str
    key: str
    """A file or, of states, checkpoints and runs, a folder."""
    files: int
    bytes: int


@dataclass
class GcReport:
    """What was removed, or would be, and what was left alone."""

    root: str
    dry_run: bool
    removed: list[Removal] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Run -> why nothing, or no orphan, of it was removed."""

    @property
    def bytes(self) -> int:
        """Of all that was removed."""
        return sum(one.bytes for one in self.removed)


def collect(
    objects: Objects,
    *,
    keep: int | None = None,
    older_than_days: float = OLDER_THAN_DAYS,
    run_id: str | None = None,
    dry_run: bool = False,
    grace_s: float = GRACE_S,
) -> GcReport:
    """Remove what nobody needs.

    Args:
        objects: the root.
        keep: trainer states, and checkpoints, that each run keeps; None: its own
            `checkpoint.keep_last`.
        older_than_days: age of quarantined manifests that are removed.
        run_id: clean this run alone.
        dry_run: only say what would be removed.
        grace_s: seconds for which a file that nothing names is left.

    Raises:
        NotFound: there is no such run.
        ValueError: `keep` is less than 1.
    """
    if keep is not None and keep < 1:
        raise ValueError("keep must be 1 or more: without its newest state a run starts anew")
    if run_id is not None:
        RunStore(objects, run_id).load_run()
    return _Collector(objects, keep, older_than_days, grace_s, dry_run).collect(run_id)


def remove_run(objects: Objects, run_id: str, *, dry_run: bool = False) -> GcReport:
    """Remove a whole run. Killed in between and called again, it goes on.

    Raises:
        NotFound: there is no such run.
        Conflict: a fork needs it, or it cannot be told whether one does.
        Fenced: a driver holds it.
    """
    report, prefix = GcReport(objects.root, dry_run), paths.run_prefix(run_id)
    parent_ids = _parents_of(objects, run_id)
    if not dry_run:
        # Held until it is gone: no driver may go on with it meanwhile.
        Lease.acquire(objects, run_id)
    elif (lease := read_lease(objects, run_id)) is not None and may_be_held(lease):
        report.skipped[run_id] = held_by(run_id, lease)
        return report
    keys = objects.list(prefix)
    sizes = _in_threads(objects.size, keys)
    report.removed.append(Removal("run", run_id, prefix, len(keys), sum(sizes)))
    if not dry_run:
        last = (paths.run_key(run_id), paths.lease_key(run_id))
        _in_threads(objects.delete, [key for key in keys if key not in last])
        for parent in parent_ids:
            drop_fork(objects, parent, run_id)
        objects.delete(last[0])
        objects.delete_tree(prefix)
    return report


def _parents_of(objects: Objects, run_id: str) -> list[str]:
    """The runs that keep something for this one, after a look that no other run needs it."""
    forks: list[str] = []
    takers: list[str] = []
    store = RunStore(objects, run_id)
    if not objects.exists(paths.run_key(run_id)):
        store.load_run()  # Says that it is not there.
    for other in run_ids(objects):
        try:
            another = RunStore(objects, other)
            parent = another.parent
            source = another.load_run().get("config", {}).get("run", {}).get("train_from")
        except StoreError as error:
            if other == run_id:
                continue
            raise Conflict(
                f"run {run_id} is not removed: whether run {other} is a fork of it cannot be told: "
                f"{error}"
            ) from None
        if parent is not None and parent.run_id == run_id:
            forks.append(other)
        elif source == run_id:
            takers.append(other)
    if takers:
        raise Conflict(
            f"run {run_id} is not removed: {', '.join(takers)} trained on its batches, which lie "
            "there; remove them first"
        )
    if forks:
        raise Conflict(
            f"run {run_id} is not removed: {', '.join(forks)} share its iterations; remove them "
            "first"
        )
    try:
        parent = store.parent
        if parent is None:
            return []
        return sorted({parent.run_id, store.owner(parent.iteration).run_id})
    except StoreError:
        return []  # Its record is torn; what its parents keep for it is too much by one state.


@dataclass
class _Folder:
    """A state or checkpoint that a committed iteration names."""

    iteration: int
    prefix: str
    files: list[FileRef]


class _Collector:
    """One collection over a root."""

    def __init__(
        self,
        objects: Objects,
        keep: int | None,
        older_than_days: float,
        grace_s: float,
        dry_run: bool,
    ) -> None:
        self._objects = objects
        self._keep = keep
        self._older_than_s = older_than_days * 86400
        self._grace_s = grace_s
        self._now = time.time()
        self._report = GcReport(objects.root, dry_run)
        self._keys: dict[str, list[str]] = {}
        self._everything: set[str] = set()
        self._named: set[str] = set()
        self._folders: dict[tuple[str, str], list[_Folder]] = {}
        self._unsafe: dict[str, str] = {}
        self._kept_for_forks: set[str] = set()

    def collect(self, only: str | None) -> GcReport:
        """Look at all runs, then clean those that were asked for."""
        ids = run_ids(self._objects)
        for run_id in ids:
            self._keys[run_id] = self._objects.list(paths.run_prefix(run_id))
            self._everything.update(self._keys[run_id])
        for run_id in ids:
            self._look(run_id, ids)
        for run_id in ids:
            self._keep_for_forks(run_id)
        for run_id in ids if only is None else [only]:
            self._clean(run_id)
        return self._report

    # --- what is needed ---------------------------------------------------------------------------

    def _look(self, run_id: str, ids: list[str]) -> None:
        """Note what a run names."""
        store = RunStore(self._objects, run_id)
        needed = ids
        try:
            needed = [one.run_id for one in store.lineage]
            store.load_run()
            manifests = _in_threads(
                self._read, [k for k in self._keys[run_id] if k.endswith("/_MANIFEST.json")]
            )
            for manifest in manifests:
                if manifest is not None:
                    self._note(manifest)
            self._named.update(file.key for file in base_files(store))
            self._named.add(paths.base_key(run_id))
            self._named.update(delta_keys(self._objects, run_id))
        except StoreError as error:
            for one in needed:
                self._unsafe.setdefault(one, f"run {run_id} cannot be read: {error}")

    def _read(self, key: str) -> Manifest | None:
        try:
            return Manifest.from_bytes(self._objects.get(key), self._objects.url(key))
        except NotFound:
            return None  # It was quarantined a moment ago.

    def _note(self, manifest: Manifest) -> None:
        self._named.update(file.key for file in manifest.files)
        done = paths.committed_key(manifest.run_id, manifest.iteration) in self._everything
        for name, folder in manifest.extra.items():
            if not isinstance(folder, dict) or not {"key_prefix", "files"} <= folder.keys():
                continue
            prefix = folder["key_prefix"]
            if paths.pruned_key(prefix) in self._everything:
                self._named.add(paths.pruned_key(prefix))
                continue
            files = [FileRef.model_validate(file) for file in folder["files"]]
            self._named.update(file.key for file in files)
            if done and _FOLDERS.get(manifest.stage) == name:
                made = _Folder(manifest.iteration, prefix, files)
                self._folders.setdefault((manifest.run_id, name), []).append(made)

    def _keep_for_forks(self, run_id: str) -> None:
        """The newest state at or before each place where a fork of this run begins."""
        try:
            store, registered = RunStore(self._objects, run_id), forks_of(self._objects, run_id)
            points = {(run_id, iteration) for _, iteration in registered}
            if store.parent is not None:
                points.add((store.parent.run_id, store.parent.iteration))
            for name, iteration in points:
                self._kept_for_forks.update(self._newest_state(name, iteration))
        except StoreError:
            return  # It is among those that were noted as unsafe.

    def _newest_state(self, run_id: str, iteration: int) -> Iterator[str]:
        for store in RunStore(self._objects, run_id).lineage:
            saved = self._folders.get((store.run_id, "state"), [])
            older = [one for one in saved if store.first_own <= one.iteration <= iteration]
            if older:
                yield max(older, key=lambda one: one.iteration).prefix
                return
            iteration = min(iteration, store.first_own - 1)

    # --- what goes --------------------------------------------------------------------------------

    def _clean(self, run_id: str) -> None:
        if run_id in self._unsafe:
            self._report.skipped[run_id] = self._unsafe[run_id]
            return
        try:
            lease = read_lease(self._objects, run_id)
        except StoreError as error:
            self._report.skipped[run_id] = f"{error}; the next driver of the run makes a new one"
            return
        if lease is not None and may_be_held(lease):
            self._report.skipped[run_id] = held_by(run_id, lease)
            return
        self._states(run_id)
        prefix = paths.run_prefix(run_id)
        for key in [*self._keys[run_id], *self._leftovers(prefix)]:
            kind = self._kind(key, prefix)
            limit = self._older_than_s if kind == "quarantined" else self._grace_s
            if kind is not None and self._age(key) >= limit:
                self._remove(kind, run_id, key)

    def _states(self, run_id: str) -> None:
        for name in _FOLDERS.values():
            found = self._folders.get((run_id, name), [])
            found = sorted(found, key=lambda one: -one.iteration)
            for one in found[self._keep or self._keep_last(run_id) :]:
                if one.prefix in self._kept_for_forks:
                    continue
                size = sum(file.bytes for file in one.files)
                self._report.removed.append(Removal(name, run_id, one.prefix, len(one.files), size))
                if not self._report.dry_run:
                    remove_folder(self._objects, one.prefix)

    def _keep_last(self, run_id: str) -> int:
        config = RunStore(self._objects, run_id).load_run().get("config", {})
        return int(config.get("checkpoint", {}).get("keep_last", 2))

    def _kind(self, key: str, prefix: str) -> str | None:
        """What a file is good for: None if it is needed."""
        if key in self._named:
            return None
        name, where = PurePosixPath(key).name, key.removeprefix(f"{prefix}/")
        if name.startswith(".") or where.startswith("weights/"):
            return "scratch"
        if name.startswith(("_MANIFEST.bad-", "lease.bad-")):
            return "quarantined"
        if name in ("_MANIFEST.json", "_COMMITTED.json"):
            return None
        return "orphan" if where.startswith(("it/", "base/", "deltas/")) else None

    def _leftovers(self, prefix: str) -> list[str]:
        """Hidden files of writers that died, which a listing leaves out."""
        folder = self._objects.local_path(prefix)
        if folder is None:
            return []
        return sorted(
            f"{prefix}/{os.path.relpath(os.path.join(at, name), folder)}"
            for at, _, names in os.walk(folder)
            for name in names
            if name.startswith(".") and name.endswith(".tmp")
        )

    def _age(self, key: str) -> float:
        where = self._objects.local_path(key) or self._objects.url(key)
        try:
            changed: Any = self._objects.filesystem.modified(str(where))
        except FileNotFoundError:
            return 0.0
        return self._now - float(changed.timestamp())

    def _remove(self, kind: str, run_id: str, key: str) -> None:
        try:
            size = self._objects.size(key)
        except NotFound:
            return
        self._report.removed.append(Removal(kind, run_id, key, 1, size))
        if not self._report.dry_run:
            self._objects.delete(key)


def _in_threads(function: Any, items: list[str]) -> list[Any]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(function, items))
