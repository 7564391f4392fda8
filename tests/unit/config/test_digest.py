"""Digests change with what is computed, and with nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import RunConfig, build_config, config_digest, with_sets
from rlcore.config.digest import NEWER, tree_digest
from rlcore.config.tree import Section

CONFIG = build_config(
    {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
    }
)


def digest(sets: Sequence[str] = (), *sections: str) -> str:
    return config_digest(with_sets(CONFIG, sets), *sections)


@pytest.mark.parametrize(
    "option",
    [
        "run.seed=1",
        "run.mode='debug-rollout-only'",
        "model.path=/other",
        "data.shuffle=false",
        "rollout.temperature=0.9",
        "algorithm.clip_high=0.28",
        "train.lr=0.5",
        "reward.timeout_s=3",
        "weights.canary_prompts=5",
    ],
)
def test_what_is_computed_counts(option: str) -> None:
    assert digest([option]) != digest()


@pytest.mark.parametrize(
    "option",
    [
        "run.id=other",
        "storage.root=/elsewhere",
        "storage.lease_ttl_s=9",
        "cluster.actor_num_gpus_per_node=2",
        "rollout.concurrency=3",
        "rollout.request_retries=9",
        "rollout.num_engines=1",
        "cluster.rollout_num_gpus=2",
        "reward.workers=4",
        "train.max_tokens_per_gpu=99",
        "train.deadline_s=5",
    ],
)
def test_where_and_how_fast_does_not_count(option: str) -> None:
    assert digest([option]) == digest()


def test_a_run_can_be_made_longer_unless_its_schedule_would_change() -> None:
    longer = "train.num_iterations=999"
    assert digest([longer]) == digest()
    assert digest(["train.lr_schedule=cosine", longer]) != digest(["train.lr_schedule=cosine"])


def test_a_section_s_digest_sees_that_section_alone() -> None:
    assert digest(["train.lr=0.5"], "data", "rollout") == digest([], "data", "rollout")
    assert digest(["train.lr=0.5"], "train") != digest([], "train")
    assert digest([], "train") != digest([], "rollout")


def test_a_digest_is_a_sha256_that_does_not_depend_on_the_order_of_keys() -> None:
    tree = CONFIG.model_dump()
    backwards = {k: dict(reversed(v.items())) for k, v in reversed(tree.items())}
    assert config_digest(build_config(backwards)) == digest()
    assert len(digest()) == 64 and int(digest(), 16)


def test_a_run_that_is_older_than_a_setting_keeps_its_digest() -> None:
    tree = CONFIG.model_dump(mode="json")
    for section, key, value in NEWER:
        assert tree[section].pop(key) == value
    assert not tree.pop("compat")
    assert tree_digest(tree) == digest()
    for name in ("run", "algorithm", "rollout", "eval"):
        assert tree_digest(tree, name) == digest((), name)


def test_operational_names_are_fields() -> None:
    fields: dict[str, Any] = {n: getattr(CONFIG, n) for n in RunConfig.model_fields}
    for section in (s for s in fields.values() if isinstance(s, Section)):
        assert set(type(section).model_fields) >= section.OPERATIONAL


def test_the_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from rlcore.config import *;"
        "print(config_digest(build_config(__import__('json').load(sys.stdin))))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        input=CONFIG.model_dump_json(),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert out.stdout.strip() == digest()


def test_of_a_path_its_last_name_counts() -> None:
    assert digest(["model.path=/mnt/model", "data.path=/mnt/train.jsonl"]) == digest()
    assert digest(["data.path=/train.jsonl@[0:9]"]) != digest()
    scored = "reward.custom_rm_path=/{}/mine.py:{}"
    assert digest([scored.format("a", "f")]) == digest([scored.format("b", "f")])
    assert digest([scored.format("a", "f")]) != digest([scored.format("a", "g")])


def test_of_each_path_in_a_list_its_last_name_counts() -> None:
    here = digest(['rollout.sample_hook_paths=["/a/hooks.py:one", "package.hooks:two"]'])
    assert here == digest(['rollout.sample_hook_paths=["/b/hooks.py:one", "package.hooks:two"]'])
    assert here != digest(['rollout.sample_hook_paths=["package.hooks:two", "/a/hooks.py:one"]'])
