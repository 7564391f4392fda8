"""The examples with tools and agents on real engines: what is trained on, what the tools were
asked, and what comes back from Parquet. That they learn is shown by whole runs, marked slow.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan
from rlcore.config import load_config
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.net import free_port
from rlcore.plugins import load_function
from rlcore.sample import Sample, Status
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects

REPO = Path(__file__).parents[3]
LEARNED = {"search_r1": (0.2, 0.8), "retool": (0.02, 0.3), "multi_agent": (0.2, 0.6)}
"""Mean reward of the first three iterations, at most, and of the last five, at least."""


@pytest.fixture
async def made(request: Any, tmp_path: Path) -> AsyncIterator[tuple[list[Sample], list[Any], Any]]:
    """One rollout of the example that the test names, as stored: samples, rewards, tokenizer."""
    from transformers import AutoTokenizer

    config = load_config(REPO / "examples" / request.param / "run.toml")
    folder = tmp_path / "model"
    assert config.model.build is not None
    load_function(config.model.build, "model.build")(folder, 0)
    port = free_port()
    engine = EngineProcess(port)
    argv = embedded_argv(folder, port, weight_version="0", context_length=16)
    engine.start(argv, tmp_path / "engine.log")
    plan = RolloutPlan(
        run_id="r",
        seed=1,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(folder),
        model=config.model,
        data=config.data,
        rollout=config.rollout.model_copy(update={"rollout_batch_size": 12}),
        reward=config.reward,
        filter=config.filter,
        eval=config.eval,
    )
    actor = RolloutActor(plan)
    try:
        engine.wait_healthy(120)
        await actor.set_engines([engine.url])
        batch = await actor.rollout(1, 0, "a", None, 0)
        scores = await actor.reward(1, 0, "a", batch.files)
    finally:
        await actor.close()
        engine.stop()
    objects = Objects.open(plan.root)
    samples = table_to_samples(read_parts(objects, batch.files))
    rewards = [row["reward"] for row in read_parts(objects, scores.files).to_pylist()]
    yield samples, rewards, AutoTokenizer.from_pretrained(folder)


def trained(sample: Sample, *, trainable: bool) -> list[int]:
    """Ids of the response that are trained on, or those that are not."""
    mask = sample.loss_mask or [1] * sample.response_length
    tokens = sample.response_tokens
    return [t for t, m in zip(tokens, mask, strict=True) if bool(m) is trainable]


def check(samples: list[Sample], tokenizer: Any) -> None:
    """What holds of every sample of every example."""
    assert len(samples) == 12 * 16
    for sample in samples:
        sample.validate()
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert tokenizer.decode(sample.response_tokens, skip_special_tokens=True) == sample.response
        assert trained(sample, trainable=True), "the model says something in every sample"
        probs = sample.rollout_log_probs or []
        mask = sample.loss_mask or [1] * sample.response_length
        assert len(probs) == len(mask) == sample.response_length
        assert all((p == 0.0) if m == 0 else (p < 0.0) for p, m in zip(probs, mask, strict=True))


@pytest.mark.parametrize("made", ["search_r1"], indirect=True)
async def test_a_search_gives_the_day_s_passage_as_tokens_that_are_not_trained_on(
    made: tuple[list[Sample], list[Any], Any],
) -> None:
    samples, rewards, tokenizer = made
    check(samples, tokenizer)
    corpus = (REPO / "examples/search_r1/corpus.jsonl").read_text().splitlines()
    written = {(r["day"], r["passage"][0]): r["passage"] for r in map(json.loads, corpus)}
    searched = [s for s in samples if trained(s, trainable=False)]
    assert len(searched) > 20
    right = 0
    for sample in searched:
        # The last id of the model's first turn is its query.
        told = (sample.loss_mask or []).index(0)
        query = tokenizer.decode([sample.response_tokens[told - 1]])
        passage = written[sample.metadata["day"], query]
        told_ids = tokenizer.encode(">" + passage, add_special_tokens=False)
        given = trained(sample, trainable=False)[: len(told_ids)]
        assert given == told_ids[: len(given)], "a passage is cut where there is no room"
        whole = given == told_ids and sample.metadata["turns"]["calls"] >= 1
        right += whole and passage == f"{sample.prompt[-1]}={sample.label}"
    assert right == sum(reward in (0.4, 1.0) for reward in rewards)


@pytest.mark.parametrize("made", ["retool"], indirect=True)
async def test_a_program_runs_and_its_output_is_not_trained_on(
    made: tuple[list[Sample], list[Any], Any],
) -> None:
    samples, _, tokenizer = made
    check(samples, tokenizer)
    ran = [s for s in samples if "program" in s.metadata]
    assert ran and all(s.metadata["turns"]["calls"] >= 1 for s in ran)
    for sample in ran:
        program = sample.metadata["program"]
        assert program["code"].endswith("(x)")
        told = trained(sample, trainable=False)
        assert told[:1] == tokenizer.encode(":", add_special_tokens=False)
        said = tokenizer.encode(":" + program["output"], add_special_tokens=False)
        assert told[: len(said)] == said
    assert all(not trained(s, trainable=False) for s in samples if s not in ran)


@pytest.mark.parametrize("made", ["multi_agent"], indirect=True)
async def test_checkers_are_given_what_the_proposers_said(
    made: tuple[list[Sample], list[Any], Any],
) -> None:
    samples, rewards, tokenizer = made
    check(samples, tokenizer)
    question = tokenizer.encode("!", add_special_tokens=False)
    for start in range(0, len(samples), 16):
        group = samples[start : start + 16]
        assert [s.metadata["role"] for s in group] == ["proposer"] * 8 + ["checker"] * 8
        for proposer, checker in zip(group[:8], group[8:], strict=True):
            assert proposer.loss_mask in (None, [1]) and checker.loss_mask == [0, 0, 1]
            assert checker.response_tokens[:2] == proposer.response_tokens + question
        accepted = [s.metadata["proposal"] for s in group[8:] if s.response.endswith("!y")]
        assert {s.metadata["team"] for s in group} == {accepted[0] if accepted else None}
    roles = {s.metadata["role"] for s, reward in zip(samples, rewards, strict=True) if reward}
    assert roles == {"proposer", "checker"}


async def test_a_program_of_the_model_is_really_run_and_an_error_is_told() -> None:
    run = load_function(f"{REPO}/examples/retool/program.py:run", "test")
    good, again, bad = [await run(f"x = [3, 7]\nprint({e})") for e in ("max(x)", "max(x)", "7(x)")]
    assert (good.ok, good.output.strip(), bad.ok) == (True, "7", False)
    assert again is good


@pytest.mark.parametrize(
    ("response", "program", "expected"),
    [
        ("max(x):77", "7", 1.0),
        ("max(x):73", "7", 0.5),
        ("min(x):33", "3", 0.2),
        ("7", None, 0.0),
        ("7(x):!", "!", 0.0),
    ],
)
def test_the_reward_for_code(response: str, program: str | None, expected: float) -> None:
    reward = load_function(f"{REPO}/examples/retool/program.py:reward", "test")
    told = {} if program is None else {"program": {"output": program}}
    given = reward(None, Sample(response=response, label="7", metadata=told))
    assert given == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "expected"),
    [("a>a=33", 1.0), ("a>a=34", 0.4), ("b>b=43", 0.6), ("3", 0.6), ("4", 0.0), ("a>a=3", 0.4)],
)
def test_the_reward_for_search(response: str, expected: float) -> None:
    reward = load_function(f"{REPO}/examples/search_r1/search.py:reward", "test")
    given = reward(None, Sample(prompt="?a", response=response, label="3"))
    assert given == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", LEARNED)
def test_it_learns(name: str, tmp_path: Path) -> None:
    """The run of the README, to its end."""
    argv = ["train", f"{REPO}/examples/{name}/run.toml", "--run-id", "r", "--root", str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *argv],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted((tmp_path / "runs/r/it").glob("*/_COMMITTED.json"))
    curve = [json.loads(f.read_text())["metrics"]["rollout/raw_reward"] for f in files]
    assert len(curve) == 50
    first, last = sum(curve[:3]) / 3, sum(curve[-5:]) / 5
    assert first < LEARNED[name][0] and last > LEARNED[name][1], curve
