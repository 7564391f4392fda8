"""Forks: runs that go on from an iteration of another one, whose artifacts they share.

A fork's `run.json` says `parent` = {run_id, iteration, digest}; a re-run says beside it `rerun` =
{stage, stages}: in its first own iteration these stages are its parent's, by manifests of the fork
that name the parent's files.

Invariants:
- Nothing is copied, and nothing is written into the parent but `forks.json`, which tells it what to
  keep.
- Everything here may be killed and done again: the fork is there once its `run.json` is, and what
  it refers to is committed before anything else is done in it.
- What would make the shared iterations another run's may not differ: seed, mode, model and data.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.config.digest import STAGE_SECTIONS, tree_digest
from rlcore.errors import ConfigError, Conflict, Corrupt, NotFound, StoreError
from rlcore.store import paths
from rlcore.store.lease import Lease
from rlcore.store.manifest import (
    SCHEMA_VERSION,
    FileRef,
    Manifest,
    StageRef,
    canonical_json,
    parse_record,
    sha256_hex,
)
from rlcore.store.objects import Objects
from rlcore.store.retention import is_pruned
from rlcore.store.run_store import Parent, RunStore, run_ids

log = logging.getLogger("sluice.store")

SHARED_STAGES = {"train": ("rollout", "reward", "filter"), "reward": ("rollout",)}
"""Stages that can be run again, and those before them that are taken from the parent."""
_FIXED = ("run.seed", "run.mode", "run.train_from", "rollout.update_weights_interval")
_WHY_FIXED = {
    "model": "the shared iterations trained that model",
    "data": "the data cursor of the shared iterations counts the rows of that data",
    "rollout": "the shared iterations have the weight syncs, and so the policies, that it asks for",
    "run": "the order of the prompts, samples and stages of the shared iterations follow from it",
}


@dataclass(frozen=True)
class Difference:
    """A setting that two runs do not share."""

    key: str
    """As `section.key`."""
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.new!r} ({self.old!r})"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Settings that differ between two stored configurations, but for the run's name and place."""
    found = []
    for section in dict.fromkeys([*old, *new]):
        here, there = old.get(section) or {}, new.get(section) or {}
        for key in dict.fromkeys([*here, *there]):
            named = (section, key) == ("run", "id") or section == "storage"
            if not named and here.get(key) != there.get(key):
                found.append(Difference(f"{section}.{key}", here.get(key), there.get(key)))
    return found


# --- making one -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForkPlan:
    """A fork that may be made; from `plan_fork`."""

    parent: RunStore
    record: dict[str, Any]
    """Its `run.json`."""
    given: frozenset[str]
    there: bool
    """It was made before."""

    @property
    def run_id(self) -> str:
        """The fork's name."""
        return str(self.record["config"]["run"]["id"])

    def make(self) -> RunStore:
        """Make it, if it is not there.

        Raises:
            ConfigError: another was made of that name meanwhile.
        """
        objects, iteration = self.parent.objects, self.record["parent"]["iteration"]
        store = RunStore(objects, self.run_id)
        if not self.there:
            # First the word to the parent: it must not give up the state meanwhile.
            for owner in {self.parent.run_id, self.parent.owner(iteration).run_id}:
                _change_forks(objects, owner, add=(self.run_id, iteration))
            try:
                store.create_run(self.record)
            except Conflict:
                check_same_fork(store, self.record, self.given)
        return store


def plan_fork(
    parent: RunStore,
    iteration: int,
    config: Mapping[str, Any],
    *,
    code: str,
    rerun: str | None = None,
    given: Collection[str] = (),
    sources: Mapping[str, str] | None = None,
) -> ForkPlan:
    """Check that a run can go on from an iteration of another. Nothing is written.

    Args:
        parent: the run to share.
        iteration: of a plain fork the last that is shared; of a re-run the one that is run again.
        config: the fork's whole configuration; names the fork.
        code: version of Sluice.
        rerun: the stage that is run again; None: a plain fork.
        given: settings that the user named, as `section.key`: they must be the fork's, even
            those that may differ from one driver to the next.
        sources: digests of the files that the configuration names.

    Raises:
        NotFound: the parent or the iteration is not there.
        ConfigError: the configuration differs where it may not, or another run has the name.
    """
    check_committed(parent, iteration)
    check_differences(parent.load_run()["config"], config, rerun)
    if rerun is not None:
        _check_shared(parent, iteration, config, rerun)
    else:
        _check_buffer(parent, iteration, config)
    shared = iteration if rerun is None else iteration - 1
    record = {
        "config": config,
        "config_digest": tree_digest(config),
        "code": code,
        "parent": asdict(_parent(parent, shared)),
        "sources": dict(sources or {}),
        "rerun": rerun and {"stage": rerun, "stages": list(SHARED_STAGES[rerun])},
    }
    store = RunStore(parent.objects, config["run"]["id"])
    try:
        check_same_fork(store, record, given)
    except NotFound:
        return ForkPlan(parent, record, frozenset(given), there=False)
    return ForkPlan(parent, record, frozenset(given), there=True)


def check_committed(store: RunStore, iteration: int) -> None:
    """The iteration of a run can be gone on from.

    Raises:
        NotFound: it is not committed; says which are.
    """
    store.load_run()
    last = store.last_committed()
    if last is None or not 0 <= iteration <= last:
        there = "none is" if last is None else f"0 to {last} are"
        raise NotFound(
            f"run {store.run_id} has no committed iteration {iteration}; {there} committed"
        )


def check_differences(old: Mapping[str, Any], new: Mapping[str, Any], rerun: str | None) -> None:
    """A fork's settings differ from its parent's only where that makes sense.

    Raises:
        ConfigError: names the setting and why it may not.
    """
    computed = [d for d in differences(old, new) if not _is_same(old, new, d.key.split(".")[0])]
    fixed = [d for d in computed if d.key in _FIXED or d.key.startswith(("model.", "data."))]
    if fixed:
        why = _WHY_FIXED[fixed[0].key.split(".")[0]]
        raise ConfigError(
            f"a fork cannot have {'; '.join(map(str, fixed))}: {why}. All but the seed and mode of "
            "the run, model and data may differ; for these start a new run"
        )
    if rerun is None:
        return
    stages = SHARED_STAGES[rerun]
    taken = {section for stage in stages for section in STAGE_SECTIONS[stage]}
    wrong = [d for d in computed if d.key.split(".")[0] in taken]
    if wrong:
        raise ConfigError(
            f"a re-run of {rerun} takes {', '.join(stages)} as stored, so it cannot have "
            f"{'; '.join(map(str, wrong))}; use `sluice fork` to generate with other settings"
        )


def _is_same(old: Mapping[str, Any], new: Mapping[str, Any], section: str) -> bool:
    """Whether a section computes the same: paths may be those of another machine, for one."""
    there = section in old and section in new
    return there and tree_digest(old, section) == tree_digest(new, section)


def _check_shared(parent: RunStore, first: int, config: Mapping[str, Any], rerun: str) -> None:
    """The stages to be taken were made with the settings that the fork has for them."""
    for name in SHARED_STAGES[rerun]:
        manifest = _committed_stage(parent, first, name)
        if manifest.config_digest != tree_digest(config, *STAGE_SECTIONS[name]):
            owner = parent.owner(first).run_id
            raise ConfigError(
                f"the {name} of iteration {first} is that of run {owner}, made with other settings "
                f"than run {parent.run_id} has; re-run it from {owner}"
            )


def _check_buffer(parent: RunStore, iteration: int, config: Mapping[str, Any]) -> None:
    """Groups that the shared rollout began and did not use fit the fork, which uses them first."""
    key = "rollout.n_samples_per_prompt"
    found = [d for d in differences(parent.load_run()["config"], config) if d.key == key]
    if found and _committed_stage(parent, iteration, "rollout").extra.get("buffer"):
        raise ConfigError(
            f"a fork after iteration {iteration} cannot have {found[0]}: that rollout left groups "
            "of the old size for the next one; fork an iteration that left none"
        )


def check_same_fork(store: RunStore, record: Mapping[str, Any], given: Collection[str]) -> None:
    """A run that is there is the fork that is asked for.

    Raises:
        NotFound: there is none.
        ConfigError: it is another; names what differs.
    """
    there = store.load_run()
    wrong = []
    if there.get("parent") != record["parent"]:
        wrong.append(f"it is {_origin(there.get('parent'))}, not {_origin(record['parent'])}")
    if there.get("rerun") != record["rerun"]:
        wrong.append(f"it is {_kind(there.get('rerun'))}, not {_kind(record['rerun'])}")
    same = there.get("config_digest") == record["config_digest"]
    for d in differences(there.get("config", {}), record["config"]):
        if d.key in given or (not same and d.key.split(".")[0] != "cluster"):
            wrong.append(f"{d.key} is {d.old!r} there and {d.new!r} here")
    if wrong:
        raise ConfigError(
            f"run {store.run_id!r} exists in {store.objects.root}: {'; '.join(wrong[:5])}. "
            "Give another name by --as"
        )


def _origin(parent: Mapping[str, Any] | None) -> str:
    if not parent:
        return "no fork"
    return f"a fork of {parent['run_id']} after iteration {parent['iteration']}"


def _kind(rerun: Mapping[str, Any] | None) -> str:
    return f"a re-run of {rerun['stage']}" if rerun else "no re-run"


def _parent(store: RunStore, iteration: int) -> Parent:
    return Parent(store.run_id, iteration, shared_digest(store, iteration))


def shared_digest(parent: RunStore, iteration: int) -> str:
    """What a fork notes of the iteration that it goes on from."""
    owner = parent.owner(iteration).run_id
    key = paths.run_key(owner) if iteration < 0 else paths.committed_key(owner, iteration)
    return sha256_hex(parent.objects.get(key))


# --- stages taken from the parent -----------------------------------------------------------------


def refer_to_parent(store: RunStore, lease: Lease) -> dict[str, StageRef]:
    """Commit the stages that a re-run takes from its parent, where that was not done yet.

    Returns:
        They, by name; nothing for a run that is no re-run.

    Raises:
        Fenced: another driver holds the run.
    """
    rerun, parent = store.load_run().get("rerun"), store.parent
    taken: dict[str, StageRef] = {}
    if not rerun or parent is None:
        return taken
    source = RunStore(store.objects, parent.run_id)
    for name in rerun["stages"]:
        found = store.stage(store.first_own, name)
        if found is not None:
            taken[name] = found[1]
            continue
        manifest = _committed_stage(source, store.first_own, name)
        own = {
            "run_id": store.run_id,
            "inputs": {k: taken[k].sha256 if k in taken else v for k, v in manifest.inputs.items()},
            "epoch": lease.epoch,
            "extra": manifest.extra | {"taken_from": source.owner(store.first_own).run_id},
            "timings": {"seconds": 0.0},
        }
        # Made anew rather than copied with changes, so that the time is that of this commit.
        fields = manifest.model_dump(exclude={"created", *own})
        taken[name] = store.commit(Manifest(**fields, **own), lease)
    return taken


def _committed_stage(store: RunStore, iteration: int, name: str) -> Manifest:
    record = store.committed(iteration)
    if record is None:
        raise NotFound(f"iteration {iteration} of run {store.run_id} is not committed any more")
    return store.manifest(StageRef.model_validate(record["stages"][name]))


# --- what a run keeps for its forks ---------------------------------------------------------------


def forks_of(objects: Objects, run_id: str) -> list[tuple[str, int]]:
    """Forks that were registered with a run, each with the iteration that it goes on from.

    One whose making was interrupted may be among them.
    """
    return _read_forks(objects, run_id)[0]


def drop_fork(objects: Objects, run_id: str, fork: str) -> None:
    """Tell a run that a fork of it is gone."""
    if objects.exists(paths.forks_key(run_id)):
        _change_forks(objects, run_id, drop=fork)


def _change_forks(
    objects: Objects, run_id: str, add: tuple[str, int] | None = None, drop: str | None = None
) -> None:
    while True:
        forks, tag = _read_forks(objects, run_id)
        now = sorted({f for f in forks if f[0] != drop} | ({add} if add else set()))
        listed = [{"run_id": name, "iteration": iteration} for name, iteration in now]
        data = canonical_json({"schema_version": SCHEMA_VERSION, "forks": listed})
        if now == forks or objects.compare_and_swap(paths.forks_key(run_id), data, tag):
            return


def _read_forks(objects: Objects, run_id: str) -> tuple[list[tuple[str, int]], str | None]:
    key = paths.forks_key(run_id)
    try:
        data, tag = objects.read_with_tag(key)
    except NotFound:
        return [], None
    try:
        listed = parse_record(data, objects.url(key))["forks"]
        return [(fork["run_id"], fork["iteration"]) for fork in listed], tag
    except (Corrupt, KeyError, TypeError) as error:
        log.warning("%s: %s; read off the forks themselves", objects.url(key), error)
        return _find_forks(objects, run_id), tag


def _find_forks(objects: Objects, run_id: str) -> list[tuple[str, int]]:
    """The forks of a run, by their own records. One that cannot be read hides no other."""
    found = []
    for name in run_ids(objects):
        try:
            parent = RunStore(objects, name).parent
            if parent is None:
                continue
            owner = RunStore(objects, parent.run_id).owner(parent.iteration)
        except StoreError as error:
            log.warning("run %s may be a fork of %s and cannot be read: %s", name, run_id, error)
            continue
        if run_id in (parent.run_id, owner.run_id):
            found.append((name, parent.iteration))
    return found


# --- the state that a fork begins with ------------------------------------------------------------


def base_state(store: RunStore) -> dict[str, Any] | None:
    """A fork's own copy of the trainer's state that it begins with, as a train manifest has it.

    There is one only where the parent kept none and its training cannot be repeated with the
    fork's settings.
    """
    key = paths.base_key(store.run_id)
    try:
        return dict(parse_record(store.objects.get(key), store.objects.url(key))["state"])
    except NotFound:
        return None


def kept_state(store: RunStore, iteration: int, train: Manifest) -> dict[str, Any] | None:
    """The trainer's state after an iteration, if it was saved and is kept.

    Args:
        store: the run.
        iteration: its iteration.
        train: the iteration's train manifest.
    """
    state = train.extra["state"]
    if state and not is_pruned(store.objects, state["key_prefix"]):
        return dict(state)
    for run in store.lineage:
        if run.first_own == iteration + 1 and (own := base_state(run)) is not None:
            return own
    return None


def put_base_state(store: RunStore, state: Mapping[str, Any], lease: Lease) -> None:
    """Keep a fork's own copy of the state that it begins with.

    Raises:
        Fenced: another driver holds the run.
    """
    lease.check()
    record = {"schema_version": SCHEMA_VERSION, "state": dict(state)}
    store.objects.put(paths.base_key(store.run_id), canonical_json(record))


def base_files(store: RunStore) -> Iterator[FileRef]:
    """The files of that copy."""
    state = base_state(store)
    for file in state["files"] if state else ():
        yield FileRef.model_validate(file)
