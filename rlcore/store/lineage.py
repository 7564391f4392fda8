"""The proof that a run is whole: from the store alone, every digest, every prompt, every state.

What a run must hold, and so what the stages put into their manifests:
- `inputs` names stages of the same iteration by their names. `policy` is the weight sync that made
  the policy: for rollout that of the iteration before, or, in modes that roll out ahead, the one
  that made its `policy_version`; for other stages that of the same iteration.
- rollout: `cursor` = {epoch, offset, next_epoch, next_offset, size}, where its new prompts begin in
  the data plan and where the next ones do; `extra["buffer"]`, if it left groups that it did not
  use, has them in its files and their `places` = [[epoch, offset], ...]; `extra["dropped"]`,
  if its filter dropped groups while it sampled, likewise. Its own groups, in the order of its rows,
  are exactly the prompts of the buffer before and those between the ends of the cursor, less those
  of its own buffer and those dropped, in the order of the data plan. `extra["mix"]` = {sizes,
  weights} where that plan mixes several files.
- reward and filter: one row a sample of the rollout, in its order.
- train: `inputs` are rollout, reward and filter; `extra` = {prev_state_id, state_id, samples,
  state}. `samples` counts the samples trained on: kept, with a reward, not failed, not removed,
  with a token to train on. `state_id` is `chain_state_id(prev_state_id, [sha of rollout, reward,
  filter], digest)` with the manifest's `config_digest`, or `extra["chain_config_digest"]` if there
  is one.
- rollout, reward and filter that were taken from another run (`run.train_from`): `inputs["taken"]`
  is that run's manifest of the same iteration, `extra["batch_of"]` that run; all else is as there.
- A folder of files in `extra`, such as `state`, is None or {key_prefix, files, ...}; if it was
  removed on purpose, `_PRUNED.json` lies in its place.
- `model/_FILES.json`, where the run built its starting model: a `FileRef` for each file of it.
- `_COMMITTED.json` of iterations 0..n without a gap, each with the SHA-256 of its stages'
  manifests.
- A fork's iterations up to the one it goes on from are its parent's, and its record has that one's
  digest.
- `config_digest` of a run's record is that of its `config`.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rlcore.config.ahead import AHEAD, WITHOUT_ENGINES, WITHOUT_TRAINER
from rlcore.config.digest import tree_digest
from rlcore.errors import NotFound, StoreError
from rlcore.sample import Status
from rlcore.store import paths
from rlcore.store.batch import read_parts
from rlcore.store.branch import base_files, shared_digest
from rlcore.store.files import find_damage
from rlcore.store.manifest import FileRef, Manifest, StageRef, chain_state_id
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore, named_files

_READERS = 8
_Stages = dict[str, tuple[Manifest, StageRef]]
_Left = dict[tuple[int, int], str]
"""Prompts that a rollout began and did not use, by their places: (epoch, offset)."""


@dataclass
class VerifyReport:
    """What was looked at, and what is wrong.

    Attributes:
        run_id: the run.
        checks: what was checked, in words.
        counts: how many of each thing were checked.
        errors: one sentence a fault; none means that the run is whole.
    """

    run_id: str
    checks: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.errors


def verify_run(objects: Objects, run_id: str) -> VerifyReport:
    """Check a whole run. Nothing is changed.

    Raises:
        NotFound: there is no such run.
    """
    store = RunStore(objects, run_id)
    config = store.load_run().get("config", {})
    verifier = _Verifier(store, config if isinstance(config, dict) else {})
    verifier.run()
    return verifier.report


class _Verifier:
    """One walk over the iterations, carrying what the next one must agree with."""

    def __init__(self, store: RunStore, config: dict[str, Any]) -> None:
        self.store = store
        self.report = VerifyReport(
            store.run_id,
            checks=[
                "every manifest and every file has the bytes that were committed",
                "every stage was made from the stages that it names",
                "every prompt was used exactly once an epoch, in the order of the data plan; those "
                "begun and not used are in the buffer",
                "every kept sample was trained on exactly once",
                "the chain of trainer states is unbroken",
                "iterations are committed without a gap",
                "the starting model, where the run built it, is as it was built",
                "the configuration is the one that the run was made with",
                "what a fork shares is what it was made from",
            ],
            counts=dict.fromkeys(
                ("iterations", "manifests", "files", "bytes", "prompts", "samples", "trained"), 0
            )
            | dict.fromkeys(("states_saved", "states_pruned", "quarantined"), 0),
        )
        self._prompts = _PromptOrder(self._data_plan(config))
        # Elsewhere every rollout is the starting model's, or another run's.
        mode = config.get("run", {}).get("mode")
        self._syncs = mode not in WITHOUT_TRAINER | WITHOUT_ENGINES
        self._async = mode in AHEAD
        self._lag = _lag(config.get("rollout", {}))
        self._policies: dict[int, str] = {}
        self._cursor: dict[str, Any] | None = None
        self._left: _Left = {}
        self._state_id: str | None = None
        self._before: _Stages = {}
        self._epochs: dict[str, int] = {}

    def run(self) -> None:
        for store in self.store.lineage:
            self._record(store)
        self._model()
        last = self.store.last_committed()
        count = 0 if last is None else last + 1
        for i in range(count):
            self._iteration(i, self._committed_stages(i))
            self.report.counts["iterations"] += 1
        self._no_gap(count)
        started = self._started_stages(count)
        if started:
            self._iteration(count, started)
        prefix = paths.run_prefix(self.store.run_id)
        self.report.counts["quarantined"] = sum(
            "/_MANIFEST.bad-" in key for key in self.store.objects.list(f"{prefix}/it")
        )

    def _record(self, store: RunStore) -> None:
        """The run's own record, and that what it was made from is there and unchanged."""
        errors, parent = self.report.errors, store.parent
        try:
            record = store.load_run()
            if tree_digest(record["config"]) != record["config_digest"]:
                errors.append(
                    f"run {store.run_id}: its config is not the one of its config_digest: "
                    "run.json was changed"
                )
            if parent and shared_digest(store.lineage[1], parent.iteration) != parent.digest:
                errors.append(
                    f"run {store.run_id}: iteration {parent.iteration} of run {parent.run_id} is "
                    "not the one that it was made from"
                )
            for file in base_files(store):
                if damage := find_damage(store.objects, file):
                    errors.append(f"run {store.run_id}: the state that it begins with: {damage}")
        except StoreError as error:
            errors.append(f"run {store.run_id}: {error}")
        except (KeyError, TypeError, AttributeError):
            errors.append(f"run {store.run_id}: its run.json holds no configuration")

    def _data_plan(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration that says which prompts come when: that of the run whose batches
        these are.
        """
        while source := config.get("run", {}).get("train_from"):
            try:
                config = RunStore(self.store.objects, source).load_run()["config"]
            except (StoreError, KeyError) as error:
                self.report.errors.append(f"the run that it trains from: {error}")
                return {}
        return config

    def _model(self) -> None:
        """The starting model is as it was built: no state can be made again without it."""
        objects = self.store.objects
        try:
            listing = json.loads(objects.get(paths.model_listing_key(self.store.origin)))
            files = [FileRef.model_validate(item) for item in listing]
        except NotFound:
            return  # It lies elsewhere, or was not built yet.
        except ValueError as error:
            self.report.errors.append(f"starting model: its list of files is torn: {error}")
            return
        faults = [find_damage(objects, file) for file in files]
        self.report.errors += [f"starting model: {fault}" for fault in faults if fault]
        self.report.counts["files"] += len(files)
        self.report.counts["bytes"] += sum(file.bytes for file in files)

    def _iteration(self, i: int, stages: _Stages) -> None:
        for manifest, ref in stages.values():
            self._files(i, manifest)
            self._inputs(i, manifest, stages)
            self.report.counts["manifests"] += 1
            epoch = self._epochs.get(manifest.run_id, 0)
            if manifest.epoch < epoch:
                self._wrong(
                    i,
                    f"{ref.stage} was committed under epoch {manifest.epoch}, after a stage of "
                    f"epoch {epoch}: a fenced driver wrote it",
                )
            self._epochs[manifest.run_id] = max(epoch, manifest.epoch)
        if "rollout" in stages:
            self._rollout(i, stages["rollout"][0])
        if "train" in stages:
            self._train(i, stages)
        if "weight_sync" in stages:
            self._policies[i + 1] = stages["weight_sync"][1].sha256
        self._before = stages

    def _committed_stages(self, i: int) -> _Stages:
        stages: _Stages = {}
        try:
            record = self.store.committed(i)
        except StoreError as error:
            self._wrong(i, str(error))
            return stages
        if record is None:
            self._wrong(i, "it is not committed, but a later one is")
            return stages
        for name, stored in record.get("stages", {}).items():
            try:
                ref = StageRef.model_validate(stored)
                stages[name] = self.store.manifest(ref), ref
            except (StoreError, ValueError) as error:
                self._wrong(i, f"{name}: {error}")
        return _in_order(stages)

    def _started_stages(self, i: int) -> _Stages:
        stages: _Stages = {}
        for name in paths.STAGES:
            try:
                found = self.store.stage(i, name)
            except StoreError as error:
                self._wrong(i, str(error))
                continue
            if found is not None:
                stages[name] = found
        return stages

    def _no_gap(self, count: int) -> None:
        prefix = paths.iteration_prefix(self.store.run_id, 0).rpartition("/")[0]
        for name in self.store.objects.children(prefix):
            if name.isdigit() and int(name) >= count:
                key = paths.committed_key(self.store.run_id, int(name))
                # Of a run that goes on, more may have been committed since; then there is no gap.
                if self.store.objects.exists(key) and self.store.committed(count) is None:
                    self._wrong(count, f"it is not committed, but iteration {int(name)} is")

    def _files(self, i: int, manifest: Manifest) -> None:
        files = named_files(self.store.objects, manifest)

        def damage(file: FileRef) -> str | None:
            try:
                return find_damage(self.store.objects, file)
            except StoreError as error:
                return str(error)

        with ThreadPoolExecutor(_READERS) as pool:
            for found in pool.map(damage, files):
                if found:
                    self._wrong(i, f"{manifest.stage}: {found}")
        self.report.counts["files"] += len(files)
        self.report.counts["bytes"] += sum(file.bytes for file in files)

    def _inputs(self, i: int, manifest: Manifest, stages: _Stages) -> None:
        for name, sha in manifest.inputs.items():
            if name == "taken":
                self._taken(i, manifest, sha)
                continue
            if name == "policy" and manifest.stage == "rollout" and self._async:
                self._made_by(i, manifest, sha)
                continue
            source = stages
            stage = "weight_sync" if name == "policy" else name
            if name == "policy" and manifest.stage == "rollout":
                source = self._before
            if stage not in source:
                self._wrong(
                    i, f"{manifest.stage} was made from {name}, of which there is no manifest"
                )
            elif source[stage][1].sha256 != sha:
                self._wrong(
                    i,
                    f"{manifest.stage} was made from {name} {sha[:12]}, but that of the run is "
                    f"{source[stage][1].sha256[:12]}",
                )
        version = manifest.policy_version or 0
        if manifest.stage == "rollout" and self._async and i - version > self._lag:
            self._wrong(
                i,
                f"rollout was made by policy version {version}, {i - version} iterations before, "
                f"but the settings allow {self._lag}",
            )
        start = self._async and not version
        named = "policy" in manifest.inputs or not self._syncs or start
        if manifest.stage == "rollout" and i and not named:
            self._wrong(i, "rollout does not name the policy that it was made with")

    def _made_by(self, i: int, manifest: Manifest, sha: str) -> None:
        """That a rollout, begun ahead, names the weight sync that made its policy."""
        version = manifest.policy_version or 0
        known = self._policies.get(version, "none")
        if known != sha:
            self._wrong(
                i,
                f"rollout was made by policy version {version} of weight sync {sha[:12]}, but that "
                f"of the run is {known[:12]}",
            )

    def _taken(self, i: int, manifest: Manifest, sha: str) -> None:
        """That a stage of another run is still the one that was taken."""
        source = str(manifest.extra.get("batch_of"))
        try:
            found = RunStore(self.store.objects, source).stage(i, manifest.stage)
        except StoreError as error:
            self._wrong(i, f"{manifest.stage} was taken from run {source}: {error}")
            return
        if found is None or found[1].sha256 != sha:
            there = found[1].sha256[:12] if found else "none"
            self._wrong(
                i,
                f"{manifest.stage} was taken from run {source} as {sha[:12]}, but that run has "
                f"{there}",
            )

    def _rollout(self, i: int, manifest: Manifest) -> None:
        table = self._read(i, manifest, ["prompt_id", "group_index"])
        if table is None:
            return
        self.report.counts["samples"] += table.num_rows
        prompts = _prompts_of(table)
        self.report.counts["prompts"] += len(prompts)
        cursor = manifest.cursor
        if cursor is None:
            self._wrong(i, "rollout has no cursor, so it cannot be told which prompts it used")
            return
        expected = (0, 0) if self._cursor is None else _end(self._cursor)
        if (cursor["epoch"], cursor["offset"]) != expected:
            self._wrong(
                i,
                f"rollout begins at epoch {cursor['epoch']}, offset {cursor['offset']}, but the "
                "one "
                f"before ended at epoch {expected[0]}, offset {expected[1]}: prompts were skipped "
                "or repeated",
            )
        if self._cursor is not None and cursor["size"] != self._cursor["size"]:
            self._wrong(
                i, f"the data set has {cursor['size']} rows, before it had {self._cursor['size']}"
            )
        left, dropped = (self._aside(i, manifest, name) for name in ("buffer", "dropped"))
        self._prompts.mix = manifest.extra.get("mix")
        if left is not None and dropped is not None:
            for fault in self._prompts.faults(cursor, prompts, self._left, left, dropped):
                self._wrong(i, fault)
        self._cursor, self._left = cursor, left or {}

    def _aside(self, i: int, manifest: Manifest, name: str) -> _Left | None:
        """The prompts that a rollout left (`buffer`), or dropped, by their places; None if they
        cannot be told.
        """
        record = manifest.extra.get(name)
        if record is None:
            return {}
        try:
            files = [FileRef.model_validate(file) for file in record["files"]]
            table = read_parts(self.store.objects, files, ["prompt_id", "group_index"])
            places = [(int(epoch), int(offset)) for epoch, offset in record["places"]]
        except (StoreError, ValueError, KeyError, TypeError) as error:
            self._wrong(i, f"the {name} of rollout: {error}")
            return None
        prompts = _prompts_of(table)
        if len(places) != len(prompts) or places != sorted(set(places)):
            self._wrong(
                i, f"the {name} holds {len(prompts)} prompts, but not at as many places in order"
            )
            return None
        return dict(zip(places, prompts, strict=True))

    def _train(self, i: int, stages: _Stages) -> None:
        manifest = stages["train"][0]
        extra = manifest.extra
        missing = {"prev_state_id", "state_id", "samples", "state"} - extra.keys()
        if missing:
            self._wrong(i, f"train says nothing of {', '.join(sorted(missing))}")
            return
        if self._state_id is not None and extra["prev_state_id"] != self._state_id:
            self._wrong(
                i,
                f"train began with state {extra['prev_state_id'][:12]}, but the iteration before "
                f"ended with {self._state_id[:12]}",
            )
        batch = [manifest.inputs.get(name, "") for name in ("rollout", "reward", "filter")]
        digest = extra.get("chain_config_digest", manifest.config_digest)
        if extra["state_id"] != chain_state_id(extra["prev_state_id"], batch, digest):
            self._wrong(
                i, "the state's id does not follow from the state before, the batch and the config"
            )
        self._state_id = extra["state_id"]
        self._trained(i, extra["samples"], stages)
        state = extra["state"]
        if state:
            pruned = self.store.objects.exists(paths.pruned_key(state["key_prefix"]))
            self.report.counts["states_pruned" if pruned else "states_saved"] += 1

    def _trained(self, i: int, trained: int, stages: _Stages) -> None:
        tables = {}
        for name, columns in _TRAINED_COLUMNS.items():
            if name not in stages:
                self._wrong(i, f"train was committed without {name}")
                return
            table = self._read(i, stages[name][0], columns)
            if table is None:
                return
            tables[name] = table
        count = tables["rollout"].num_rows
        for name in ("reward", "filter"):
            if tables[name]["row"].to_pylist() != list(range(count)):
                self._wrong(i, f"{name} does not have one row a sample of the rollout, in order")
                return
        expected = int(_trainable(**tables).sum())
        if trained != expected:
            self._wrong(i, f"{trained} samples were trained on, but {expected} are to be")
        self.report.counts["trained"] += trained

    def _read(self, i: int, manifest: Manifest, columns: list[str]) -> pa.Table | None:
        try:
            return read_parts(self.store.objects, manifest.files, columns)
        except (StoreError, ValueError) as error:
            self._wrong(i, f"{manifest.stage}: {error}")
            return None

    def _wrong(self, i: int, fault: str) -> None:
        sentence = f"iteration {i}: {fault}"
        if sentence not in self.report.errors:
            self.report.errors.append(sentence)


class _PromptOrder:
    """Checks prompts against the data plan: one row of the data set, one prompt, always."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._seed = config.get("run", {}).get("seed")
        self._shuffle = config.get("data", {}).get("shuffle")
        # What a source of one's own chose, its prompts alone tell.
        self._own = bool(config.get("rollout", {}).get("data_source_path"))
        self._id_of: dict[int, str] = {}
        self._row_of: dict[str, int] = {}
        self._used: dict[int, set[str]] = {}
        self.mix: dict[str, Any] | None = None
        """Sizes and weights of the files, where several are mixed: a prompt may then come twice."""

    def faults(
        self,
        cursor: dict[str, Any],
        prompts: list[str],
        before: _Left,
        left: _Left,
        dropped: _Left,
    ) -> Iterator[str]:
        """What is wrong with the prompts of one rollout.

        Args:
            cursor: of the rollout.
            prompts: of its groups, in order.
            before: what the rollout before left.
            left: what this one leaves.
            dropped: what its filter dropped.
        """
        size = cursor["size"]
        start = cursor["epoch"] * size + cursor["offset"]
        count = cursor["next_epoch"] * size + cursor["next_offset"] - start
        begun = {*before, *(divmod(place, size) for place in range(start, start + count))}
        for epoch, offset in sorted(left.keys() - begun):
            yield (
                f"the buffer holds the prompt at epoch {epoch}, offset {offset}, which was not "
                "in the buffer before and not passed by the cursor"
            )
        for epoch, offset in sorted(dropped.keys() - (begun - left.keys())):
            yield (
                f"the prompt at epoch {epoch}, offset {offset} was dropped, but it was not begun, "
                "or is in the buffer as well"
            )
        taken = sorted(begun - left.keys() - dropped.keys())
        if len(taken) != len(prompts):
            moved = f"the cursor moved by {count} prompts"
            if before or left:
                moved += f", the buffer had {len(before)} before and has {len(left)} now"
            if dropped:
                moved += f", {len(dropped)} were dropped"
            yield f"{moved}, but the rollout has {len(prompts)}"
            return
        for (epoch, offset), prompt in zip(taken, prompts, strict=True):
            used = self._used.setdefault(epoch, set())
            if prompt in used and self.mix is None and not self._own:
                yield f"prompt {prompt} was used twice in epoch {epoch}"
            used.add(prompt)
            yield from self._misplaced(size, (epoch, offset), prompt, "the rollout used")
        for place, prompt in left.items():
            yield from self._misplaced(size, place, prompt, "the buffer holds")
        for place, prompt in dropped.items():
            yield from self._misplaced(size, place, prompt, "the rollout dropped")
        oldest = min([cursor["next_epoch"] - 1, *(epoch for epoch, _ in left)])
        for epoch in [e for e in self._used if e < oldest]:
            del self._used[epoch]

    def _misplaced(self, size: int, place: tuple[int, int], prompt: str, who: str) -> Iterator[str]:
        """That a prompt is not the one that the data plan has at its place."""
        row = self._row(size, *place)
        if row is None:
            return
        known = self._id_of.setdefault(row, prompt), self._row_of.setdefault(prompt, row)
        if known != (prompt, row):
            yield (
                f"the data plan has row {row} at epoch {place[0]}, offset {place[1]}, which is "
                f"prompt {known[0]}, but {who} prompt {prompt}"
            )

    def _row(self, size: int, epoch: int, offset: int) -> int | None:
        if self._own or self._shuffle is None or self._seed is None:
            return None
        from rlcore.data.order import Order

        sizes, weights = [size], [1.0]
        if self.mix is not None:
            sizes, weights = self.mix["sizes"], self.mix["weights"]
        order = Order(tuple(sizes), tuple(weights), self._seed, self._shuffle)
        return order.position_at((epoch, offset))


_TRAINED_COLUMNS = {
    "rollout": ["status", "remove_sample", "response_length", "loss_mask"],
    "reward": ["row", "status"],
    "filter": ["row", "reward", "keep"],
}


def _trainable(rollout: pa.Table, reward: pa.Table, filter: pa.Table) -> np.ndarray[Any, Any]:
    """Which rows of a rollout are trained on: bool [rows]."""
    masks = rollout["loss_mask"].to_pylist()
    lengths = rollout["response_length"].to_pylist()
    tokens = [n if m is None else np.count_nonzero(m) for m, n in zip(masks, lengths, strict=True)]
    good = np.asarray(tokens, np.int64) > 0
    for table in (rollout, reward):
        good &= np.asarray([s != Status.FAILED for s in table["status"].to_pylist()], bool)
    good &= ~np.asarray(rollout["remove_sample"].to_pylist(), bool)
    good &= np.asarray([r is not None for r in filter["reward"].to_pylist()], bool)
    good &= np.asarray(filter["keep"].to_pylist(), bool)
    return good


def _lag(rollout: dict[str, Any]) -> int:
    """Iterations that the policy of a rollout may lie behind, with rollouts made ahead."""
    own = rollout.get("async_buffer_size", 1) + rollout.get("update_weights_interval", 1) - 1
    return int(own if rollout.get("max_staleness") is None else rollout["max_staleness"])


def _prompts_of(table: pa.Table) -> list[str]:
    """The prompt of each group, in the order of the rows."""
    groups = zip(table["group_index"].to_pylist(), table["prompt_id"].to_pylist(), strict=True)
    return [prompt for _, prompt in dict.fromkeys(groups)]


def _end(cursor: dict[str, Any]) -> tuple[int, int]:
    return cursor["next_epoch"], cursor["next_offset"]


def _in_order(stages: _Stages) -> _Stages:
    known = {name: stages[name] for name in paths.STAGES if name in stages}
    return known | stages
