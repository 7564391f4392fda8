"""One run in the store: what is done, and the one way to say that something is.

Invariants:
- A stage is done if and only if its manifest is there and every file that it names is whole.
- A manifest and an iteration's record are put if absent, after a look at the lease: of two that
  commit the same stage one wins, and the other gets the winner's reference or `Conflict`.
- Nothing here lists folders, except `run_ids`.
- A fork has iterations 0 to `parent.iteration` of its parent, by reference: they are read where
  they lie, through any number of forks, and written by nobody.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlcore.errors import Conflict, Corrupt, NotFound
from rlcore.store import paths
from rlcore.store.files import find_damage
from rlcore.store.lease import Lease
from rlcore.store.manifest import (
    SCHEMA_VERSION,
    FileRef,
    Manifest,
    StageRef,
    canonical_json,
    parse_record,
    sha256_hex,
    utc_now,
)
from rlcore.store.objects import Objects

log = logging.getLogger("sluice.store")

# A manifest that is there at the put and gone at the read was quarantined in between, or the read
# was stale; so often in a row, with these pauses, means that something else is wrong.
_RACES = 5
_STALE_PAUSE_S = 1.0
_KEPT_MANIFESTS = 64


@dataclass(frozen=True)
class Parent:
    """Where a fork began."""

    run_id: str
    iteration: int
    """The last one that it shares; -1: none but the starting model."""
    digest: str
    """SHA-256 of that iteration's commit record; of the parent's run record if there is none."""


class RunStore:
    """The artifacts of one run."""

    def __init__(self, objects: Objects, run_id: str, *, children: tuple[str, ...] = ()) -> None:
        """`children`: the forks through which this run was come to."""
        self.objects = objects
        self.run_id = run_id
        self._prefix = paths.run_prefix(run_id)
        self._last_seen = -1
        self._manifests: dict[str, Manifest] = {}
        self._children = (*children, run_id)
        self._parent: tuple[Parent, RunStore] | None = None
        self._known = False

    @property
    def url(self) -> str:
        """Address of the run's folder."""
        return self.objects.url(self._prefix)

    @property
    def parent(self) -> Parent | None:
        """What this run is a fork of; None if of nothing, or if it is not there yet.

        Raises:
            Corrupt: its record is no record, or its forefathers are its children.
        """
        found = self._find_parent()
        return found[0] if found else None

    @property
    def first_own(self) -> int:
        """The first iteration that is this run's own and not its parent's."""
        return self.parent.iteration + 1 if self.parent else 0

    def owner(self, iteration: int) -> "RunStore":
        """The store of the run that an iteration belongs to: this one or a forefather."""
        found = self._find_parent()
        return found[1].owner(iteration) if found and iteration <= found[0].iteration else self

    @property
    def lineage(self) -> "list[RunStore]":
        """This run, its parent, and so on to the one that is no fork."""
        found = self._find_parent()
        return [self, *(found[1].lineage if found else [])]

    @property
    def origin(self) -> str:
        """The last of `lineage`: whose starting model this run began with."""
        return self.lineage[-1].run_id

    def _find_parent(self) -> "tuple[Parent, RunStore] | None":
        if not self._known:
            key = paths.run_key(self.run_id)
            try:
                record = parse_record(self.objects.get(key), self.objects.url(key))
            except NotFound:
                return None  # It may be made any time.
            if record.get("parent") is not None:
                self._parent = self._read_parent(record["parent"])
            self._known = True
        return self._parent

    def _read_parent(self, tree: Any) -> "tuple[Parent, RunStore]":
        where = self.objects.url(paths.run_key(self.run_id))
        try:
            parent = Parent(tree["run_id"], int(tree["iteration"]), tree["digest"])
            store = RunStore(self.objects, parent.run_id, children=self._children)
        except (KeyError, TypeError, ValueError, NotFound) as error:
            raise Corrupt(f"{where} does not say what it is a fork of: {error!r}") from None
        if parent.run_id in self._children:
            raise Corrupt(f"{where} names run {parent.run_id} as its parent, which is its own fork")
        return parent, store

    def create_run(self, record: Mapping[str, Any]) -> bool:
        """Write `run.json`, once.

        Args:
            record: at least `config_digest`; the store adds schema_version, run_id and created.

        Returns:
            True if the run is new, False if it was there with the same `config_digest`.

        Raises:
            Conflict: the run is there with another config.
        """
        full = {
            "created": utc_now(),
            **record,
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
        }
        if self.objects.put_if_absent(paths.run_key(self.run_id), canonical_json(full)):
            return True
        there = self.load_run()
        if there.get("config_digest") != full.get("config_digest"):
            raise Conflict(
                f"run {self.run_id} is there with another config (digest "
                f"{str(there.get('config_digest'))[:12]}, this one has "
                f"{str(full.get('config_digest'))[:12]}); choose another --run-id or resume it as "
                "it is"
            )
        return False

    def load_run(self) -> dict[str, Any]:
        """The run's record.

        Raises:
            NotFound: there is no such run.
        """
        key = paths.run_key(self.run_id)
        try:
            data = self.objects.get(key)
        except NotFound:
            raise NotFound(
                f"run {self.run_id} is not under {self.objects.root}; `sluice runs` lists those "
                "that are"
            ) from None
        return parse_record(data, self.objects.url(key))

    def lookup(
        self, iteration: int, stage: str, inputs: Mapping[str, str], config_digest: str
    ) -> StageRef | None:
        """The committed stage, if it is done for these inputs and this config.

        Every file that the manifest names is read and digested. If one is damaged, the manifest
        and those of later stages made from it are quarantined with the reason logged, and the
        stage counts as not done.

        Args:
            iteration: iteration number.
            stage: stage name.
            inputs: name -> SHA-256 of the input's manifest.
            config_digest: digest of what the stage computes.

        Raises:
            Conflict: it was done from other inputs or with another config.
            Corrupt: a file of an iteration that is committed is damaged; redoing it would break
                the chain.
        """
        found = self._read_manifest(iteration, stage)
        if isinstance(found, str):
            self._quarantine(iteration, stage, None, found)
            return None
        if found is None:
            return None
        manifest, ref = found
        self._refuse_other(manifest, ref, inputs, config_digest)
        for file in named_files(self.objects, manifest):
            damage = find_damage(self.objects, file)
            if damage and self.objects.reads_may_be_stale:
                time.sleep(_STALE_PAUSE_S)
                damage = find_damage(self.objects, file)
            if damage:
                self._quarantine(iteration, stage, ref.sha256, damage)
                return None
        return ref

    def commit(self, manifest: Manifest, lease: Lease) -> StageRef:
        """Put the manifest, or return the reference of an equal one that was first.

        Raises:
            Fenced: another driver holds the run.
            Conflict: the stage was committed from other inputs or with another config, or its
                iteration is the parent's.
            Corrupt: what was committed first is no manifest; `lookup` quarantines it.
        """
        if manifest.iteration < self.first_own:
            raise Conflict(
                f"iteration {manifest.iteration} of run {self.run_id} is that of its parent "
                f"{self.owner(manifest.iteration).run_id}, where nothing is written"
            )
        key = paths.manifest_key(self.run_id, manifest.iteration, manifest.stage)
        data = manifest.to_bytes()
        for _ in range(_RACES):
            lease.check()
            if self.objects.put_if_absent(key, data):
                ref = manifest.ref(key, data)
                self._keep(ref.sha256, manifest)
                return ref
            found = self._read_manifest(manifest.iteration, manifest.stage)
            if isinstance(found, str):
                raise Corrupt(found)
            if found is not None:
                first, ref = found
                self._refuse_other(first, ref, manifest.inputs, manifest.config_digest)
                return ref
            self._await_fresh()
        raise Conflict(
            f"{self.objects.url(key)} appears and vanishes; another process works on this run"
        )

    def manifest(self, ref: StageRef) -> Manifest:
        """Load what a reference points to.

        Raises:
            NotFound: it is gone.
            Corrupt: its bytes are not those that were referred to.
        """
        if ref.sha256 in self._manifests:
            return self._manifests[ref.sha256]
        data = self.objects.get(ref.key)
        where = self.objects.url(ref.key)
        if sha256_hex(data) != ref.sha256:
            raise Corrupt(f"{where} has sha256 {sha256_hex(data)}, its reference says {ref.sha256}")
        manifest = Manifest.from_bytes(data, where)
        self._keep(ref.sha256, manifest)
        return manifest

    def _keep(self, sha256: str, manifest: Manifest) -> None:
        """Remember a manifest by its content, so that a remote store is not asked again."""
        self._manifests[sha256] = manifest
        while len(self._manifests) > _KEPT_MANIFESTS:
            del self._manifests[next(iter(self._manifests))]

    def _await_fresh(self) -> None:
        """Give a store whose reads lag behind its writes time to catch up."""
        if self.objects.reads_may_be_stale:
            time.sleep(_STALE_PAUSE_S)

    def stage(self, iteration: int, stage: str) -> tuple[Manifest, StageRef] | None:
        """A stage's manifest as it lies there, its files unread; None if there is none.

        Raises:
            Corrupt: it is torn.
        """
        found = self.owner(iteration)._read_manifest(iteration, stage)
        if isinstance(found, str):
            raise Corrupt(found)
        return found

    def commit_iteration(
        self, iteration: int, record: Mapping[str, Any], lease: Lease
    ) -> dict[str, Any]:
        """Write the record that ends an iteration, or return an equal one that was first.

        Args:
            iteration: iteration number.
            record: `stages` (name -> StageRef or its dict), `metrics` (name -> number), and what
                else is worth keeping. The store adds schema_version, run_id, iteration, epoch,
                created and `sha256`, the digest of all the rest.
            lease: the holding to commit under.

        Raises:
            Fenced: another driver holds the run.
            Conflict: the iteration was committed with other stages.
        """
        stages = {
            name: ref.model_dump() if isinstance(ref, StageRef) else dict(ref)
            for name, ref in record.get("stages", {}).items()
        }
        own = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "iteration": iteration,
            "epoch": lease.epoch,
        }
        full = {"created": utc_now(), "metrics": {}, **record, "stages": stages, **own}
        key = paths.committed_key(self.run_id, iteration)
        full["sha256"] = record_digest(full)
        lease.check()
        if self.objects.put_if_absent(key, canonical_json(full)):
            return full
        for _ in range(_RACES):
            if (there := self.committed(iteration)) is not None:
                break
            self._await_fresh()
        if there is None or _digests(there["stages"]) != _digests(stages):
            raise Conflict(
                f"{self.objects.url(key)} was committed with other stages; resume the run to go on "
                "from it"
            )
        return there

    def committed(self, iteration: int) -> dict[str, Any] | None:
        """The record of a committed iteration; None if it is not committed.

        Raises:
            Corrupt: it is torn, or does not have the digest that it names.
        """
        key = paths.committed_key(self.owner(iteration).run_id, iteration)
        try:
            data = self.objects.get(key)
        except NotFound:
            return None
        record = parse_record(data, self.objects.url(key))
        if record.get("sha256") != record_digest(record):
            raise Corrupt(
                f"{self.objects.url(key)} was changed after it was written: its digest is "
                f"{record_digest(record)[:12]}, it names {str(record.get('sha256'))[:12]}; restore "
                "it from a copy"
            )
        return record

    def last_committed(self) -> int | None:
        """Number of the last committed iteration, the parent's included; None if there is none.

        About 2 log2(n) probes, no listing.
        """

        def there(iteration: int) -> bool:
            return self.objects.exists(paths.committed_key(self.run_id, iteration))

        low, step = max(self._last_seen, self.first_own - 1), 1
        while there(low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if there(middle) else (low, middle)
        self._last_seen = low
        return low if low >= 0 else None

    def _read_manifest(self, iteration: int, stage: str) -> tuple[Manifest, StageRef] | str | None:
        """The manifest with its reference.

        None if absent; what is wrong with it if it cannot be believed.
        """
        key = paths.manifest_key(self.run_id, iteration, stage)
        where = self.objects.url(key)
        try:
            data = self.objects.get(key)
            manifest = Manifest.from_bytes(data, where)
        except NotFound:
            return None
        except Corrupt as error:
            return str(error)
        named = (manifest.run_id, manifest.iteration, manifest.stage)
        if named != (self.run_id, iteration, stage):
            return f"{where} is the manifest of another stage: {named}"
        return manifest, manifest.ref(key, data)

    def _refuse_other(
        self, manifest: Manifest, ref: StageRef, inputs: Mapping[str, str], config_digest: str
    ) -> None:
        where = self.objects.url(ref.key)
        if manifest.inputs != dict(inputs):
            names = sorted(
                n for n in {*manifest.inputs, *inputs} if manifest.inputs.get(n) != inputs.get(n)
            )
            raise Conflict(
                f"{where} was made from another {', '.join(names)}; another driver committed it, "
                "or an earlier stage was redone: resume the run from its committed stages"
            )
        if manifest.config_digest != config_digest:
            raise Conflict(
                f"{where} was made with another config (digest {manifest.config_digest[:12]}, "
                f"asked for {config_digest[:12]}); keep the run's config or start another run"
            )

    def _quarantine(self, iteration: int, stage: str, digest: str | None, reason: str) -> None:
        """Put a manifest aside, and those of the iteration that were made from it."""
        if self.objects.exists(paths.committed_key(self.run_id, iteration)):
            raise Corrupt(
                f"{reason}; iteration {iteration} of run {self.run_id} is committed and later ones "
                "build on it: restore the file from a copy, or start another run"
            )
        key = paths.manifest_key(self.run_id, iteration, stage)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        try:
            data = self.objects.get(key)
        except NotFound:
            return
        self.objects.put(paths.bad_manifest_key(self.run_id, iteration, stage, stamp), data)
        self.objects.delete(key)
        log.error(
            "%s: stage counts as not done, its manifest is quarantined: %s",
            self.objects.url(key),
            reason,
        )
        for later in paths.STAGES:
            found = self._read_manifest(iteration, later) if later != stage else None
            if not isinstance(found, tuple):
                continue
            inputs = found[0].inputs
            # The digest of a torn manifest is lost; then the input's name has to do.
            if digest in inputs.values() or (digest is None and stage in inputs):
                reason = f"its input {stage} was quarantined"
                self._quarantine(iteration, later, found[1].sha256, reason)


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of a commit record but for the field that holds it."""
    return sha256_hex(canonical_json({k: v for k, v in record.items() if k != "sha256"}))


def named_files(objects: Objects, manifest: Manifest) -> list[FileRef]:
    """All files that a manifest answers for.

    Its parts, and the folders among its extras ({key_prefix, files, ...}, such as the trainer's
    state) that were not pruned.
    """
    files = list(manifest.files)
    for folder in manifest.extra.values():
        if not isinstance(folder, dict) or not {"key_prefix", "files"} <= folder.keys():
            continue
        if not objects.exists(paths.pruned_key(folder["key_prefix"])):
            files += [FileRef.model_validate(file) for file in folder["files"]]
    return files


def run_ids(objects: Objects) -> list[str]:
    """All runs under a root, sorted."""
    return [name for name in objects.children(paths.RUNS) if objects.exists(paths.run_key(name))]


def _digests(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: ref["sha256"] for name, ref in stages.items()}
