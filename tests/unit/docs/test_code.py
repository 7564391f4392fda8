"""The code in the pages runs: custom functions, readers of the store, queries, JSON shapes."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import load_config
from rlcore.config.digest import tree_digest
from rlcore.observe.sql import connect
from rlcore.rollout.filters import make_rule
from rlcore.rollout.rewards import Scorer
from rlcore.sample import Sample, Status
from rlcore.store.objects import Objects
from rlcore.store.run_store import record_digest

REPO = Path(__file__).parents[3]
FENCE = re.compile(r"^```(?P<kind>\w+)(?: file=(?P<file>\S+))?\n(?P<text>.*?)^```$", re.M | re.S)


def blocks(kind: str) -> dict[str, str]:
    """Name (or number) -> text of all blocks of a kind in all pages."""
    found = [
        match
        for page in sorted(REPO.glob("docs/*.md"))
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
        if match["kind"] == kind
    ]
    return {match["file"] or str(n): match["text"] for n, match in enumerate(found)}


def python(code: list[str], cwd: Path) -> str:
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, *code], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every named block as a file, beside the examples that they extend."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "examples").symlink_to(REPO / "examples")
    for kind in ("python", "toml"):
        for name, text in blocks(kind).items():
            assert "." in name, f"a {kind} block has no file=NAME"
            (folder / name).write_text(text.replace("my-run", "r"))
    return folder


@pytest.fixture(scope="module")
def stored(written: Path) -> Path:
    """A small run named r, for my-run in the pages, under `sluice-data` of that folder."""
    spec = importlib.util.spec_from_file_location(
        "writing_runs", REPO / "tests" / "unit" / "store" / "test_lineage.py"
    )
    assert spec and spec.loader
    writing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writing)
    root = written / "sluice-data"
    writing.write_run(Objects.open(root), 3)
    add(root / "runs/r/run.json", "config", {"train": {"num_iterations": 3}})
    for path in root.glob("runs/r/it/*/_COMMITTED.json"):
        add(path, "metrics", {"rollout/raw_reward": 0.5})
    return root


def add(path: Path, key: str, more: dict[str, Any]) -> None:
    """Lay more on an object of a JSON file."""
    record = json.loads(path.read_text())
    record |= {key: record[key] | more}
    if "sha256" in record:
        record["sha256"] = record_digest(record)
    if "config_digest" in record:
        record["config_digest"] = tree_digest(record["config"])
    path.write_text(json.dumps(record))


def group(*responses: str) -> list[Sample]:
    """Answers to `7=` of one group."""
    return [
        Sample(
            group_index=0,
            index=n,
            prompt="7=",
            label="777",
            response=text,
            response_length=len(text),
            tokens=[1] * (2 + len(text)),
            status=Status.COMPLETED,
        )
        for n, text in enumerate(responses)
    ]


@pytest.mark.parametrize(
    ("name", "responses", "rewards"),
    [
        ("rewards", ["777", "7", "no", ""], [1.0, 0.1, 0.0, 0.0]),
        ("graded", ["777", "7770", "123", "1"], [1.0, 0.8, 0.2, 0.0]),
        ("ranked", ["7771", "777", "7", ""], [1.0, 1.1, 0.0, 0.0]),
        ("brief_math", [r"\boxed{777}", r"\boxed{7}", "777", ""], [1.2, 0.1, 0.0, 0.0]),
    ],
)
def test_the_rewards_score(
    written: Path, name: str, responses: list[str], rewards: list[float]
) -> None:
    config = load_config(written / f"{name}.toml")
    scorer = Scorer(config.reward)
    try:
        scores = scorer.score_now(group(*responses))
    finally:
        scorer.close()
    assert [s.error for s in scores] == [None] * len(scores)
    assert [s.reward for s in scores] == pytest.approx(rewards)
    if config.reward.reward_key:
        assert set(json.loads(scores[0].details or "{}")) == {"score", "right", "brief"}


def test_the_filter_decides(written: Path) -> None:
    config = load_config(written / "filters.toml")
    rule = make_rule(config.filter, {"reward_key": None, "n_samples_per_prompt": 2})
    samples = group("777", "777")
    for rewards, keep in (((1.0, 1.0), False), ((1.0, 0.0), True)):
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
        verdict = rule.decide(rewards, samples)
        assert (verdict.keep, verdict.reason) == (keep, None if keep else "too_easy")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """An embedded engine on the quickstart's model."""
    from rlcore.engine.launch import EngineProcess, embedded_argv
    from rlcore.net import free_port

    folder = tmp_path_factory.mktemp("engine")
    model = REPO / "examples" / "quickstart" / "model.py"
    runpy.run_path(str(model))["build"](folder / "model", 0)
    port = free_port()
    process = EngineProcess(port)
    process.start(embedded_argv(folder / "model", port), folder / "engine.log")
    try:
        process.wait_healthy(120)
        yield process.url, folder / "model"
    finally:
        process.stop()


async def test_the_generate_function_takes_two_turns(
    written: Path, engine: tuple[str, Path]
) -> None:
    from rlcore.data.tokenizer import load_tokenizer
    from rlcore.rollout.generate import Generator
    from rlcore.rollout.limits import Limits
    from rlcore.rollout.pool import EnginePool

    url, model = engine
    config = load_config(written / "two_turns.toml").rollout
    tokenizer = load_tokenizer(str(model), False)
    [nudge] = tokenizer.encode(":", add_special_tokens=False)
    pool = EnginePool([url], Limits.of_model(model, config.context_length))
    samples = [
        Sample(tokens=tokenizer.encode("7="), group_index=0, index=n, prompt_id="p", seed=n)
        for n in range(4)
    ]
    try:
        done = await Generator(config, tokenizer, pool).run(samples, 4, None)
    finally:
        await pool.close()
    for sample in done:
        sample.validate()
        mask = sample.loss_mask or []
        assert mask.count(0) == 1
        assert sample.response_tokens[mask.index(0)] == nudge
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert ":" in sample.response and len(sample.weight_versions) == 2


@pytest.mark.parametrize("name", [n for n in blocks("python") if n.startswith("read_")])
def test_the_readers_read_a_store_without_this_package(
    name: str, written: Path, stored: Path
) -> None:
    text = (written / name).read_text()
    assert "rlcore" not in text and "flows" not in text
    printed = python([name], written)
    assert "1.4" in printed if "duckdb" in name else "'reward': " in printed


@pytest.mark.parametrize("query", blocks("sql").values())
def test_the_queries_have_answers(query: str, stored: Path) -> None:
    assert connect(Objects.open(stored)).execute(query.replace("my-run", "r")).fetchall()


def test_the_json_has_the_keys_that_the_page_says(written: Path, stored: Path) -> None:
    text = (REPO / "docs" / "commands.md").read_text()
    lists = re.findall(r"\{([a-z_,\s0-9]+)\}", text)
    said = [{key.strip() for key in keys.split(",")} for keys in lists]

    def keys_of(*args: str) -> set[str]:
        found: Any = json.loads(python(["-m", "flows.cli", *args, "--json"], written))
        return set(found[0] if isinstance(found, list) else found)

    assert keys_of("runs") in said
    assert keys_of("samples", "r", "--iter", "1") in said
    assert keys_of("verify", "r") in said
    assert keys_of("show", "r", "--iter", "1") - {"schema_version"} in said
    table = text.partition("## show")[2].partition("## samples")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    assert keys_of("show", "r") == {k for row in rows for k in re.findall(r"`(\w+)`", row)}


def test_the_functions_of_the_trainer_keep_their_contract(written: Path) -> None:
    from rlcore.plugin_check import check_plugin

    algorithm = load_config(written / "training.toml").algorithm
    assert algorithm.custom_pg_loss_reducer_function_path
    for name, kind in {
        "ranks": "reward_post_process",
        "first_half": "convert_samples",
        "fading": "advantage",
        "no_strangers": "tis",
        "over_a_constant": "pg_loss_reducer",
        "cross_entropy": "loss",
    }.items():
        found = check_plugin(f"{written}/training.py:{name}", kind)  # type: ignore[arg-type]
        assert [one for one in found if one.problem] == []


async def test_the_rollout_functions_of_the_page_make_a_batch(
    written: Path, engine: tuple[str, Path]
) -> None:
    from rlcore.data import load_dataset
    from rlcore.data.tokenizer import load_tokenizer
    from rlcore.rollout.generate import Generator
    from rlcore.rollout.limits import Limits
    from rlcore.rollout.loop import rollout
    from rlcore.rollout.pool import EnginePool
    from rlcore.rollout.supply import RolloutRequest

    url, model = engine
    config = load_config(written / "own_rollout.toml")
    own = config.rollout.model_copy(update={"rollout_batch_size": 3, "n_samples_per_prompt": 4})
    tokenizer = load_tokenizer(str(model), False)
    data = load_dataset(config.data, lambda: tokenizer)
    pool = EnginePool([url], Limits.of_model(model, own.context_length))
    try:
        request = RolloutRequest(0, 0, True, None, None)
        made = await rollout(request, data, tokenizer, own, Generator(own, tokenizer, pool))
        buffered = own.model_copy(
            update={
                "custom_rollout_function_path": None,
                "buffer_filter_path": f"{written}/own_rollout.py:newest_first",
            }
        )
        request = RolloutRequest(1, 0, True, made.cursor, None, made.left)
        again = await rollout(
            request, data, tokenizer, buffered, Generator(buffered, tokenizer, pool)
        )
    finally:
        await pool.close()
    assert (len(made.samples), len(made.left), made.dropped) == (12, 1, [])
    lengths = [sample.response_length for sample in made.samples]
    assert max(lengths[1::2]) <= 2 < max(lengths[::2])
    assert made.left[0].samples[0].prompt_id == again.samples[0].prompt_id
    assert again.metrics["rollout/buffer/taken_groups"] == 1


def test_the_curriculum_of_the_page_keeps_its_contract(
    written: Path, engine: tuple[str, Path]
) -> None:
    from rlcore.plugin_check import check_plugin

    found = check_plugin(f"{written}/curriculum.py:FromTheFront", "data_source", model=engine[1])
    assert len(found) == 3 and not any(one.problem for one in found)


def test_the_evaluation_of_the_page_can_be_called_as_one(written: Path) -> None:
    from rlcore.rollout.own_evaluation import OwnEvaluation

    assert OwnEvaluation(f"{written}/own_evaluation.py:shortest")


def test_the_sample_filter_of_the_page_marks_the_longest(written: Path) -> None:
    page = runpy.run_path(str(written / "own_rollout.py"))
    samples = group("1", "123", "12")
    page["not_the_longest"](None, [samples])
    assert [sample.remove_sample for sample in samples] == [False, True, False]
