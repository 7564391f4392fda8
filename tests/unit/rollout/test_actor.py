"""The rollout actor: the stages one after another, what they write, and who may call."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan
from rlcore.config.tree import (
    DataConfig,
    EvalConfig,
    EvalDataset,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError, Corrupt, DataError, EngineError, Fenced, RewardError
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects

REWARD = """
def reward(args, sample, **kwargs):
    return {"score": sample.seed % 3 / 2, "note": sample.label, "strict": sample.seed % 3 - 2}

def fails_once(args, sample):
    if sample.index == 3:
        raise ValueError("no answer found")
    return 1.0

def keep_even(args, samples):
    assert all(s.reward["score"] >= 0 for s in samples)
    return samples[0].group_index % 2 == 0, "odd"
"""


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path) -> RolloutPlan:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{d}=", "answer": str(d) * 3} for d in range(10)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return RolloutPlan(
        run_id="r",
        seed=5,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model_folder),
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path=str(data), label_key="answer"),
        rollout=RolloutConfig(rollout_batch_size=6, n_samples_per_prompt=4, max_response_len=8),
        reward=RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:reward", reward_key="score"),
        filter=FilterConfig(),
        eval=EvalConfig(
            eval_interval=1,
            datasets=[
                EvalDataset(name="greedy", path=f"{data}@[0:3]"),
                EvalDataset(
                    name="many", path=str(data), n_samples_per_eval_prompt=4, temperature=1.0
                ),
            ],
        ),
    )


async def made(plan: RolloutPlan, servers: list[Any]) -> RolloutActor:
    actor = RolloutActor(plan)
    await actor.set_engines([s.url for s in servers])
    return actor


async def test_the_stages_of_one_iteration(plan: RolloutPlan, servers: list[Any]) -> None:
    actor = await made(plan, servers)
    assert await actor.ping() == {"rows": 10, "skipped": 0, "too_long": 0}
    batch = await actor.rollout(1, 0, "a", None, 0)
    scores = await actor.reward(1, 0, "a", batch.files)
    chosen = await actor.filter(1, 0, "a", batch.files, scores.files)
    await actor.close()
    objects = Objects.open(plan.root)
    samples = table_to_samples(read_parts(objects, batch.files))
    assert [s.group_index for s in samples] == [g for g in range(6) for _ in range(4)]
    assert [s.index for s in samples] == list(range(24))
    assert len({s.seed for s in samples}) == 24
    assert all(s.label == s.prompt[0] * 3 and s.weight_versions == ["0"] for s in samples)
    assert batch.cursor == {"epoch": 0, "offset": 0, "next_epoch": 0, "next_offset": 6, "size": 10}
    assert batch.metrics["rollout/response_len/mean"] == 3
    assert 0 < batch.compute_seconds < 5
    rows = read_parts(objects, scores.files).to_pylist()
    assert [r["reward"] for r in rows] == [s.seed % 3 / 2 for s in samples]
    assert json.loads(rows[0]["details"])["note"] == samples[0].label
    assert [(r["row"], r["status"], r["error"]) for r in rows] == [
        (k, "completed", None) for k in range(24)
    ]
    assert scores.metrics["rollout/raw_reward"] == pytest.approx(
        sum(r["reward"] for r in rows) / 24
    )
    selection = read_parts(objects, chosen.files).to_pylist()
    assert [r["reward"] for r in selection] == [r["reward"] for r in rows]
    assert all(r["keep"] and r["reason"] is None for r in selection)
    assert chosen.extra == {"kept": 24}


async def test_the_next_iteration_goes_on_where_the_cursor_says(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    actor = await made(plan, servers)
    first = await actor.rollout(1, 0, "a", None, 0)
    second = await actor.rollout(1, 1, "b", first.cursor, 0)
    await actor.close()
    objects = Objects.open(plan.root)
    ids = [
        [s.prompt_id for s in table_to_samples(read_parts(objects, r.files))[::4]]
        for r in (first, second)
    ]
    assert len(set(ids[0] + ids[1][:4])) == 10
    assert second.cursor == {"epoch": 0, "offset": 6, "next_epoch": 1, "next_offset": 2, "size": 10}


async def test_a_rollout_done_again_is_the_same_to_the_bit(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    refs = []
    for urls in (servers, servers[:1]):
        actor = await made(plan, urls)
        refs.append((await actor.rollout(1, 3, f"a{len(urls)}", None, 0)).files[0])
        await actor.close()
    assert refs[0].sha256 == refs[1].sha256
    assert refs[0].key != refs[1].key


async def test_a_restarted_actor_reads_what_it_needs_and_verifies_it(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    actor = await made(plan, servers)
    batch = await actor.rollout(1, 0, "a", None, 0)
    scores = await actor.reward(1, 0, "a", batch.files)
    await actor.close()
    spec = f"{tmp_path}/reward.py:keep_even"
    plan = replace(plan, filter=FilterConfig(dynamic_sampling_filter_path=spec))
    again = RolloutActor(plan)
    assert (await again.reward(1, 0, "b", batch.files)).files[0].sha256 == scores.files[0].sha256
    chosen = await again.filter(1, 0, "b", batch.files, scores.files)
    assert chosen.metrics["rollout/dynamic_filter/drop_odd"] == 3
    assert chosen.extra == {"kept": 12}
    await again.close()
    third = RolloutActor(plan)
    part = tmp_path / "store" / batch.files[0].key
    damaged = bytearray(part.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    part.write_bytes(damaged)
    with pytest.raises(Corrupt):
        await third.reward(1, 0, "c", batch.files)
    await third.close()


async def test_evaluation_gives_rows_and_metrics_of_each_data_set(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    actor = await made(plan, servers)
    found = await actor.evaluate(1, 0, "a", 0)
    later = await actor.evaluate(1, 7, "b", 0)
    await actor.close()
    objects = Objects.open(plan.root)
    greedy, many = (table_to_samples(read_parts(objects, [f])) for f in found.files)
    assert (len(greedy), len(many), found.extra) == (3, 40, {"datasets": ["greedy", "many"]})
    assert all(isinstance(s.reward, dict) for s in greedy + many)
    metrics = found.metrics
    assert metrics["eval/many"] == pytest.approx(sum(s.reward["score"] for s in many) / 40)
    assert metrics["eval/many/pass@1"] == pytest.approx(metrics["eval/many/exact"])
    assert metrics["eval/many/pass@1"] <= metrics["eval/many/pass@2"] <= metrics["eval/many/pass@4"]
    assert "eval/greedy/pass@2" not in metrics
    assert later.files[1].sha256 == found.files[1].sha256
    sent = [
        p
        for s in servers
        for path, b in s.seen
        if path == "/generate"
        for p in b["sampling_params"]
    ]
    assert sorted({p["temperature"] for p in sent}) == [0.0, 1.0]


async def test_an_evaluation_may_count_another_entry_of_the_reward(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    own = plan.eval.model_copy(update={"reward_key": "strict"})
    actor = await made(replace(plan, eval=own), servers)
    batch = await actor.rollout(1, 0, "a", None, 0)
    scores = await actor.reward(1, 0, "a", batch.files)
    found = await actor.evaluate(1, 0, "a", 0)
    await actor.close()
    many = table_to_samples(read_parts(Objects.open(plan.root), [found.files[1]]))
    values = [s.reward["strict"] for s in many if isinstance(s.reward, dict)]
    assert found.metrics["eval/many"] == pytest.approx(sum(values) / 40) and len(values) == 40
    assert scores.metrics["rollout/raw_reward"] >= 0 > found.metrics["eval/many"]


async def test_a_driver_of_an_older_lease_is_refused(plan: RolloutPlan, servers: list[Any]) -> None:
    actor = await made(plan, servers)
    batch = await actor.rollout(4, 0, "a", None, 0)
    with pytest.raises(Fenced, match="epoch 3 called, but epoch 4"):
        await actor.reward(3, 0, "a", batch.files)
    await actor.close()


async def test_an_engine_of_another_policy_fails_the_stage(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    # So long it waits for an engine to get the right weights.
    impatient = plan.rollout.model_copy(update={"start_timeout_s": 1.0, "request_retries": 1})
    actor = await made(replace(plan, rollout=impatient), servers)
    servers[1].version = "8"
    with pytest.raises(EngineError, match="no engine answers with policy version '9'"):
        await actor.rollout(1, 0, "a", None, 9)
    await actor.close()


async def test_failures_over_the_limit_stop_and_under_it_are_counted(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    reward = RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:fails_once")
    actor = await made(replace(plan, reward=reward), servers)
    batch = await actor.rollout(1, 0, "a", None, 0)
    with pytest.raises(
        RewardError, match=r"1 of 24 samples.*sample 3 .*ValueError: no answer found"
    ):
        await actor.reward(1, 0, "a", batch.files)
    await actor.close()
    actor = await made(
        replace(plan, reward=reward.model_copy(update={"max_failed": 0.05})), servers
    )
    scores = await actor.reward(1, 0, "b", batch.files)
    chosen = await actor.filter(1, 0, "b", batch.files, scores.files)
    await actor.close()
    rows = read_parts(Objects.open(plan.root), scores.files).to_pylist()
    assert [(r["row"], r["status"]) for r in rows if r["reward"] is None] == [(3, "failed")]
    assert scores.metrics["reward/unscored"] == 1
    picked = read_parts(Objects.open(plan.root), chosen.files).to_pylist()
    assert [(r["row"], r["reason"]) for r in picked if not r["keep"]] == [(3, "unscored")]


def test_a_plain_tokenizer_is_the_one_that_auto_tokenizer_gives(
    model_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, Qwen2Tokenizer

    found = load_tokenizer(str(model_folder), False)
    expected = AutoTokenizer.from_pretrained(model_folder)
    assert type(found) is type(expected)
    assert found("12=", add_special_tokens=False) == expected("12=", add_special_tokens=False)
    assert found.special_tokens_map == expected.special_tokens_map
    vocab = {chr(k + 33): k for k in range(90)}
    Qwen2Tokenizer(vocab=vocab, merges=[]).save_pretrained(tmp_path)
    assert type(load_tokenizer(str(tmp_path), False)).__name__ == "Qwen2Tokenizer"


async def test_what_cannot_be_loaded_is_said_by_the_first_call(
    plan: RolloutPlan, tmp_path: Path
) -> None:
    actor = RolloutActor(replace(plan, data=DataConfig(path=str(tmp_path / "none.jsonl"))))
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        await actor.ping()
    await actor.close()
    (tmp_path / "empty").mkdir()
    actor = RolloutActor(replace(plan, model_folder=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match="no tokenizer"):
        await actor.ping()
    await actor.close()
