"""Batches of another run: taken by reference, proved, refused where they do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import Refs, SmallRun, config_tree

from rlcore.config import RunConfig, build_config
from rlcore.config.tree import ModelConfig
from rlcore.errors import ConfigError, Conflict, NotFound
from rlcore.observe.sql import connect
from rlcore.store.gc import collect, remove_run
from rlcore.store.lineage import verify_run
from rlcore.store.objects import Objects
from rlcore.store.paths import manifest_key
from rlcore.store.run_store import RunStore
from rlcore.stored_runs import BATCH, check_source, stored_batch, take, vocabulary


class Taker(SmallRun):
    """Trains on the batches of run a, as `debug-train-only` does."""

    def iteration(self, i: int, *, commit: bool = True) -> Refs:
        refs: Refs = {}
        for name in (*BATCH, "train"):
            refs[name] = self.stage(i, name, dict(refs))
        self.store.commit_iteration(i, {"stages": refs, "metrics": {}}, self.lease)
        return refs

    def _made(self, i: int, name: str, inputs: Refs) -> dict[str, Any]:
        if name not in BATCH:
            return super()._made(i, name, inputs)
        ref = stored_batch(self.store, "a", i)[name]
        work = take(self.store, ref)
        named = {key: one.sha256 for key, one in inputs.items()} | {"taken": ref.sha256}
        files = {"files": tuple(work.files), "cursor": work.cursor}
        return files | {"extra": work.extra, "metrics": work.metrics, "inputs": named}


def tree(name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    return config_tree(name, run={"mode": "debug-train-only", "train_from": "a"}, **sections)


@pytest.fixture
def rooted(disk: Objects) -> Objects:
    """A root with run a, four iterations, and run b, which trained on three of them."""
    SmallRun(disk, "a", config_tree("a")).run(4)
    # Its seed says nothing of the order of the prompts: that is run a's.
    Taker(disk, "b", tree("b", data={"shuffle": True})).run(3)
    return disk


def test_batches_are_the_other_run_s_by_reference(rooted: Objects) -> None:
    assert not [key for key in rooted.list("runs/b") if key.endswith(".parquet")]
    report = verify_run(rooted, "b")
    assert report.ok, report.errors
    assert (report.counts["iterations"], report.counts["trained"]) == (3, 12)
    rows = connect(rooted).execute("select run_id, count(*) from samples group by 1 order by 1")
    assert rows.fetchall() == [("a", 16), ("b", 12)]


def test_a_batch_that_is_another_by_now_is_noticed(rooted: Objects) -> None:
    key = manifest_key("a", 1, "reward")
    changed = json.loads(rooted.get(key)) | {"attempt": "another"}
    rooted.put(key, json.dumps(changed).encode())
    [fault] = [f for f in verify_run(rooted, "b").errors if "taken" in f]
    assert fault.startswith("iteration 1: reward was taken from run a as ")


def test_a_run_whose_batches_are_trained_on_stays(rooted: Objects) -> None:
    before = set(rooted.list("runs"))
    collect(rooted, grace_s=-1.0)
    assert {key for key in before if "/rollout/" in key} <= set(rooted.list("runs"))
    with pytest.raises(Conflict, match="run a is not removed: b trained on its batches"):
        remove_run(rooted, "a")
    remove_run(rooted, "b")
    remove_run(rooted, "a")


def config(name: str = "c", **sections: dict[str, Any]) -> RunConfig:
    train = {"num_iterations": 4} | sections.pop("train", {})
    return build_config(tree(name, train=train, **sections))


def test_a_run_that_fits_is_accepted(rooted: Objects) -> None:
    check_source(RunStore(rooted, "c"), config(algorithm={"clip_high": 0.5}, train={"lr": 0.1}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"train_from": "none"}}, "run.train_from: run none is not under"),
        ({"run": {"train_from": "c"}}, "is the run itself"),
        ({"train": {"num_iterations": 5}}, "has 4 committed iterations, and train.num_iterations"),
        ({"reward": {"timeout_s": 9.0}}, r"reward.timeout_s = 9.0 \(30.0\).*sluice rerun a"),
        ({"rollout": {"temperature": 0.5}}, "temperature = 0.5, but run a sampled at 1.0"),
        ({"model": {"path": "/models/other"}}, r"'tiny'\) gives other token ids .*'other'"),
    ],
)
def test_what_does_not_fit_is_one_error(
    rooted: Objects, sections: dict[str, dict[str, Any]], said: str
) -> None:
    mode = {"mode": "debug-train-only", "train_from": "a"}
    made = config_tree("c", **{"run": mode, "train": {"num_iterations": 4}})
    for name, keys in sections.items():
        made[name] |= keys
    with pytest.raises((ConfigError, NotFound), match=said):
        check_source(RunStore(rooted, "c"), build_config(made))


def test_an_iteration_that_is_not_there_is_named(rooted: Objects) -> None:
    with pytest.raises(NotFound, match=r"no committed iteration 4 \(0 to 3 are committed\)"):
        stored_batch(RunStore(rooted, "c"), "a", 4)


def test_a_vocabulary_is_what_gives_tokens_their_ids(disk: Objects, tmp_path: Path) -> None:
    def folder(name: str, tokens: dict[str, int], **more: Any) -> ModelConfig:
        (tmp_path / name).mkdir()
        whole = {"model": {"type": "WordLevel", "vocab": tokens}, "added_tokens": []} | more
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(whole))
        return ModelConfig(path=str(tmp_path / name))

    def digest(model: ModelConfig) -> str | None:
        return vocabulary(disk, "c", model)

    first = folder("first", {"a": 0, "b": 1})
    assert digest(first) == digest(folder("same", {"b": 1, "a": 0}, padding={"length": 9}))
    assert digest(first) != digest(folder("other", {"a": 1, "b": 0}))
    assert digest(ModelConfig(path="/nowhere")) is None
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vocab.txt").write_text("a\nb\n")
    assert digest(ModelConfig(path=str(tmp_path / "old"))) not in (None, digest(first))
    built = ModelConfig(build="model.py:build")
    assert digest(built) is None
    disk.put("runs/c/model/tokenizer.json", (tmp_path / "first/tokenizer.json").read_bytes())
    assert digest(built) == digest(first)
