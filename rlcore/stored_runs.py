"""Batches of another run, for `run.mode = "debug-train-only"`: found, checked, taken.

Invariants:
- Nothing is copied: the manifests of this run name the other's files, and the other's manifests by
  their digests, so that a batch that changed is noticed.
- What is taken is what this run would have: scored and selected by the same settings, of the same
  token ids, sampled at the temperature that the trainer computes with.
"""

import json
from collections.abc import Callable
from pathlib import Path

from rlcore.config import ModelConfig, RunConfig, build_config, config_digest
from rlcore.errors import ConfigError, NotFound
from rlcore.images.files import KIND as IMAGE
from rlcore.images.processor import takes_images
from rlcore.images.text_alone import check_text_alone
from rlcore.store.branch import differences
from rlcore.store.manifest import StageRef, canonical_json, sha256_hex
from rlcore.store.objects import Objects
from rlcore.store.paths import model_prefix, new_attempt
from rlcore.store.run_store import RunStore
from rlcore.work import Work

BATCH = ("rollout", "reward", "filter")
"""The stages that make a batch."""
CLOCK = "perf/"
"""Metrics of how fast it was made, which are the other run's alone."""
TOKENIZERS = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
"""Files that give tokens their ids, where there is no tokenizer.json."""


def stored_batch(store: RunStore, source: str, i: int) -> dict[str, StageRef]:
    """The stages of iteration i of another run that make its batch.

    Args:
        store: of the run that takes them.
        source: the other run.
        i: iteration.

    Raises:
        NotFound: there is no such run, or the iteration is not committed there.
    """
    other = _source(store, source)
    record = other.committed(i)
    if record is None:
        last = other.last_committed()
        there = "none is" if last is None else f"0 to {last} are"
        raise NotFound(
            f"run {store.run_id} trains on the batches of run {source}, which has no committed "
            f"iteration {i} ({there} committed); let that run go on, or lower train.num_iterations"
        )
    return {name: StageRef.model_validate(record["stages"][name]) for name in BATCH}


def take(store: RunStore, ref: StageRef) -> Work:
    """A committed stage of another run as the work of one of this run.

    Raises:
        NotFound, Corrupt: its manifest is gone, or not the one that is referred to.
    """
    there = store.manifest(ref)
    return Work(
        attempt=new_attempt(),
        files=list(there.files),
        metrics={k: v for k, v in there.metrics.items() if not k.startswith(CLOCK)},
        policy_version=there.policy_version,
        cursor=there.cursor,
        extra=there.extra | {"batch_of": ref.run_id},
    )


# --- whether it can be trained on -----------------------------------------------------------------


def check_source(store: RunStore, config: RunConfig) -> None:
    """The other run is there, and has what this one is to train on.

    Args:
        store: of the run that is to train; need not be there yet.
        config: its configuration.

    Raises:
        NotFound: there is no such run.
        ConfigError: it has too few iterations, or was made with other settings; names them.
    """
    source = config.run.train_from
    other = _source(store, source)
    theirs = build_config(other.load_run()["config"])
    last = other.last_committed()
    committed = 0 if last is None else last + 1
    if committed < config.train.num_iterations:
        raise ConfigError(
            f"run.train_from = {source!r}: that run has {committed} committed iterations, and "
            f"train.num_iterations = {config.train.num_iterations} asks for more; let it go on, or "
            "lower train.num_iterations"
        )
    _check_settings(config, theirs)
    check_vocabulary(store, config)
    check_media(store, config)


def _source(store: RunStore, source: str) -> RunStore:
    other = RunStore(store.objects, source)
    if source == store.run_id:
        raise ConfigError(f"run.train_from = {source!r} is the run itself; name another one")
    try:
        other.load_run()
    except NotFound as error:
        raise NotFound(f"run.train_from: {error}") from None
    return other


def _check_settings(config: RunConfig, theirs: RunConfig) -> None:
    source = config.run.train_from
    for section in ("reward", "filter"):
        if config_digest(config, section) == config_digest(theirs, section):
            continue
        here, there = config.model_dump(mode="json"), theirs.model_dump(mode="json")
        found = differences({section: there[section]}, {section: here[section]})
        raise ConfigError(
            f"run {source} was made with other settings: {'; '.join(map(str, found))}. "
            "debug-train-only takes its rewards and its selection as they are stored: set the "
            f"same here, or score them again by `sluice rerun {source} --stage reward`"
        )
    here_t, there_t = config.rollout.temperature, theirs.rollout.temperature
    if here_t != there_t:
        raise ConfigError(
            f"rollout.temperature = {here_t}, but run {source} sampled at {there_t}: the trainer "
            "would compute other log-probs than those of the samples; set the same"
        )


def check_media(store: RunStore, config: RunConfig) -> None:
    """Where the other run's prompts have images, this run's model and functions read them.

    A model of this run that is not built yet is not looked at.

    Raises:
        ConfigError: one does not.
    """
    source = config.run.train_from
    if IMAGE not in build_config(_source(store, source).load_run()["config"]).data.multimodal_keys:
        return
    what = f"the prompts of run.train_from = {source!r} have images"
    model = config.model
    folder = model.path or store.objects.local_path(model_prefix(store.origin))
    if folder and (Path(folder) / "config.json").is_file() and not takes_images(folder):
        raise ConfigError(
            f"the model of {model.path or model.build} takes no images (its config.json has no "
            f"vision_config), but {what}; train a model that does"
        )
    check_text_alone(config, what)


def check_vocabulary(store: RunStore, config: RunConfig) -> None:
    """The other run's token ids mean the same here.

    Not looked at where this run's model is not built yet. Where one of the tokenizers is not to be
    seen from here, the names count.

    Raises:
        ConfigError: they do not.
    """
    other = _source(store, config.run.train_from)
    theirs = build_config(other.load_run()["config"]).model
    mine = vocabulary(store.objects, store.origin, config.model)
    known = vocabulary(store.objects, other.origin, theirs)
    if mine is None and config.model.build:
        return
    seen = mine is not None and known is not None
    same = mine == known if seen else _name(config.model) == _name(theirs)
    if not same:
        raise ConfigError(
            f"run.train_from = {other.run_id!r}: the tokenizer of that run "
            f"({_name(theirs)!r}) gives other token ids than this run's ({_name(config.model)!r}), "
            "so its samples would be other texts here; train a model of the same tokenizer"
        )


def vocabulary(objects: Objects, run_id: str, model: ModelConfig) -> str | None:
    """A digest of what gives tokens their ids; None where it is not to be seen from here.

    Args:
        objects: the store, for a model that a run has built.
        run_id: that run.
        model: where the tokenizer is.
    """
    read = _reader(objects, run_id, model)
    whole = read("tokenizer.json")
    if whole is not None:
        try:
            tree = json.loads(whole)
            parts = {"model": tree["model"], "added_tokens": tree.get("added_tokens")}
        except (ValueError, KeyError, TypeError):
            return sha256_hex(whole)
        return sha256_hex(canonical_json(parts))
    found = {name: sha256_hex(data) for name in TOKENIZERS if (data := read(name)) is not None}
    return sha256_hex(canonical_json(found)) if found else None


def _reader(objects: Objects, run_id: str, model: ModelConfig) -> Callable[[str], bytes | None]:
    folder = model.tokenizer or model.path

    def read(name: str) -> bytes | None:
        try:
            if folder:
                return (Path(folder) / name).read_bytes()
            return objects.get(f"{model_prefix(run_id)}/{name}")
        except (NotFound, FileNotFoundError, NotADirectoryError):
            return None

    return read


def _name(model: ModelConfig) -> str:
    """What a model is called wherever it lies."""
    return (model.tokenizer or model.path or model.build).rpartition("/")[2]
