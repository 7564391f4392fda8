"""Functions of one's own around a rollout, and that no prompt is lost whatever they do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from transformers import AutoTokenizer

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan, StageReport
from rlcore.config.tree import (
    DataConfig,
    EvalConfig,
    EvalDataset,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from rlcore.errors import DataError, PluginError
from rlcore.rollout.generate import Generator
from rlcore.rollout.groups import split_groups
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool
from rlcore.sample import Sample, Status
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects

CODE = """
import asyncio
import json
import pathlib
from dataclasses import replace
from types import SimpleNamespace

from rlcore.rollout.generate import apply_result
from rlcore.sample import Status

KEPT = []
SEEN = pathlib.Path(__file__).with_name("seen")

def reward(args, sample, **kwargs):
    return float(sample.seed % 2)

def mark(args, groups):
    for group in groups:
        rewards = [s.reward for s in group]
        for s in group:
            s.remove_sample = s.reward == max(rewards)
            s.response = "not kept"

def see(args, all_groups, data_source):
    SEEN.write_text(json.dumps([[s.reward for s in g] for g in all_groups]))

def asks(args, all_groups, data_source):
    data_source.get_samples(1)

def newest(args, rollout_id, buffer, num_samples):
    taken = buffer[-1:]
    del buffer[-2:]
    return taken

async def batch(args, rollout_id, data_source, evaluation=False):
    assert not evaluation and len(data_source) == 40
    groups = data_source.get_samples(args.rollout_batch_size + 2)
    done = await asyncio.gather(*(args.generate_group(g) for g in groups[:-1]))
    for group in done:
        for s in group:
            s.reward = 0.5
    data_source.add_samples([done[-1]])
    return SimpleNamespace(samples=done[:-1], metrics={"mine": 3})

def short(args, rollout_id, data_source):
    return data_source.get_samples(1)

def pending(args, rollout_id, data_source):
    return data_source.get_samples(args.rollout_batch_size)

async def grouped(args, samples, sampling_params):
    assert len(samples) == len(sampling_params) == args.n_samples_per_prompt
    for sample, params in zip(samples, sampling_params):
        assert params["sampling_seed"] == sample.seed
        apply_result(sample, await args.generate(sample.tokens, params))
        sample.metadata["together"] = [s.seed for s in samples]
    return samples

async def loses_one(args, samples, sampling_params):
    return (await grouped(args, samples, sampling_params))[1:]

def says_where(args, sample, *, rollout_id, evaluation):
    assert args.rollout_batch_size == 4 and args.tokenizer and sample.reward is None
    sample.metadata["where"] = [rollout_id, evaluation, sample.status.value]

async def puts_another(args, sample):
    await asyncio.sleep(0)
    return replace(sample, index=99, seed=1, prompt_id="x", loss_mask=[0] * sample.response_length,
                   metadata=sample.metadata | {"then": "another"})

def first_again(args, sample):
    KEPT.append(sample)
    return KEPT[0]

def cuts_the_mask(args, sample):
    sample.loss_mask = [0]

def sorts_and_marks(args, groups):
    for group in groups:
        group.sort(key=lambda s: -s.reward)
    groups.reverse()
    mark(args, groups)

def takes_out(args, groups):
    groups[0].pop()

async def words(args, rollout_id, data_source):
    return SimpleNamespace(samples=(await batch(args, rollout_id, data_source)).samples,
                           metrics={"mine": "three"})

def returns_text(args, sample, **kwargs):
    assert not kwargs
    return sample.response

def raises(args, sample, evaluation):
    raise KeyError("mine")

async def own(args, sample, sampling_params):
    apply_result(sample, await args.generate(sample.tokens, sampling_params))
    sample.metadata["by"] = "own"
    return sample
"""
WANT, N = 4, 2


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path) -> RolloutPlan:
    (tmp_path / "mine.py").write_text(CODE)
    rows = [{"prompt": f"{d % 10}{d // 10}="} for d in range(40)]
    return RolloutPlan(
        run_id="r",
        seed=5,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model_folder),
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path=data_file(tmp_path, rows)),
        rollout=rollout(tmp_path),
        reward=RewardConfig(custom_rm_path=f"{tmp_path}/mine.py:reward"),
        filter=FilterConfig(),
        eval=EvalConfig(),
    )


def data_file(folder: Path, rows: list[dict[str, Any]], name: str = "prompts.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rollout(folder: Path, **more: Any) -> RolloutConfig:
    functions = {k: f"{folder}/mine.py:{v}" for k, v in more.items() if k.endswith("_path")}
    base = {"rollout_batch_size": WANT, "n_samples_per_prompt": N, "max_response_len": 8}
    return RolloutConfig(**base | more | functions)


async def run(
    plan: RolloutPlan, servers: list[Any], i: int = 0, cursor: dict[str, Any] | None = None
) -> StageReport:
    actor = RolloutActor(plan)
    await actor.set_engines([s.url for s in servers])
    try:
        return await actor.rollout(1, i, f"a{i}", cursor, 0)
    finally:
        await actor.close()


def samples_of(plan: RolloutPlan, files: Any) -> list[Sample]:
    refs = [FileRef.model_validate(file) for file in files]
    return table_to_samples(read_parts(Objects.open(plan.root), refs))


async def test_a_sample_filter_marks_what_is_not_trained_on(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    hooked = rollout(
        tmp_path, rollout_sample_filter_path="mark", rollout_all_samples_process_path="see"
    )
    hooked_plan = replace(plan, rollout=hooked)
    batch = await run(hooked_plan, servers)
    samples = samples_of(plan, batch.files)
    rewards = [[float((s.seed or 0) % 2) for s in group] for group in split_groups(samples)]
    marked = [[s.remove_sample for s in group] for group in split_groups(samples)]
    assert marked == [[r == max(group) for r in group] for group in rewards]
    assert all(s.response != "not kept" and s.reward is None for s in samples)
    assert json.loads((tmp_path / "seen").read_text()) == rewards
    # The scores that it looked at are those of the stage after; the filter is asked there.
    assert batch.extra["scores"]["filter_digest"] == ""
    plain = await run(replace(plan, root=plan.root + "2"), servers)
    assert [s.tokens for s in samples_of(plan, batch.files)] == [
        s.tokens for s in samples_of(replace(plan, root=plan.root + "2"), plain.files)
    ]


async def test_a_filter_s_marks_stay_with_the_samples_that_it_marked(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    hooked = rollout(tmp_path, rollout_sample_filter_path="sorts_and_marks")
    samples = samples_of(plan, (await run(replace(plan, rollout=hooked), servers)).files)
    for group in split_groups(samples):
        rewards = [float((s.seed or 0) % 2) for s in group]
        assert [s.remove_sample for s in group] == [r == max(rewards) for r in rewards]
    taken = rollout(tmp_path, rollout_sample_filter_path="takes_out")
    with pytest.raises(PluginError, match=r"took samples out of the lists .* remove_sample"):
        await run(replace(plan, root=plan.root + "2", rollout=taken), servers)


async def test_nothing_is_drawn_for_a_batch_that_is_complete(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    hooked = rollout(tmp_path, rollout_all_samples_process_path="asks")
    with pytest.raises(PluginError, match="asks for samples, but the batch is complete"):
        await run(replace(plan, rollout=hooked), servers)


async def test_a_rollout_function_makes_the_batch_and_every_prompt_is_accounted_for(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    plan = replace(plan, rollout=rollout(tmp_path, custom_rollout_function_path="batch"))
    first = await run(plan, servers)
    groups = split_groups(samples_of(plan, first.files))
    assert len(groups) == WANT
    assert all(s.reward == 0.5 and s.status == Status.COMPLETED for g in groups for s in g)
    assert first.metrics["mine"] == 3
    assert first.metrics["rollout/dropped/not_used"] == 1
    assert first.cursor and first.cursor["next_offset"] == WANT + 2
    assert first.extra["buffer"]["places"] == [[0, WANT]]
    assert first.extra["dropped"]["places"] == [[0, WANT + 1]]
    assert first.extra["dropped"]["reasons"] == ["not_used"]
    # Without partial rollouts its prompt alone is kept.
    assert not any(s.response_length for s in samples_of(plan, first.extra["buffer"]["files"]))
    partial = plan.rollout.model_copy(update={"partial_rollout": True})
    whole = await run(replace(plan, rollout=partial, root=plan.root + "2"), servers)
    kept = samples_of(replace(plan, root=plan.root + "2"), whole.extra["buffer"]["files"])
    assert all(s.response_length and s.metadata["start_rollout_id"] == 0 for s in kept)
    # What was given back comes first.
    cursor = {**first.cursor, "buffer": first.extra["buffer"]}
    second = await run(plan, servers, 1, cursor)
    back = samples_of(plan, first.extra["buffer"]["files"])[0].prompt_id
    assert samples_of(plan, second.files)[0].prompt_id == back
    assert second.cursor and second.cursor["next_offset"] == 2 * WANT + 3


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("short", "returned 1 groups; a batch is a list of 4"),
        ("pending", "with status pending"),
        ("words", "words': its metrics must be a dict of numbers, not {'mine': 'three'}"),
    ],
)
async def test_a_rollout_function_that_makes_no_batch_is_named(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path, name: str, fault: str
) -> None:
    own = rollout(tmp_path, custom_rollout_function_path=name)
    with pytest.raises(PluginError, match=fault):
        await run(replace(plan, rollout=own), servers)


async def test_a_buffer_filter_picks_and_gives_up(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    sampled = rollout(tmp_path, over_sampling_batch_size=8, partial_rollout=True)
    first = await run(replace(plan, rollout=sampled), servers)
    left = first.extra["buffer"]["places"]
    assert len(left) == 4
    own = rollout(
        tmp_path, over_sampling_batch_size=8, partial_rollout=True, buffer_filter_path="newest"
    )
    cursor = {**(first.cursor or {}), "buffer": first.extra["buffer"]}
    second = await run(replace(plan, rollout=own), servers, 1, cursor)
    assert second.extra["dropped"]["places"] == [left[-2]]
    assert second.extra["dropped"]["reasons"] == ["buffer_filter"]
    assert second.metrics["rollout/buffer/taken_groups"] == 1
    assert second.cursor and second.cursor["next_offset"] == 8 + 7
    begun = {tuple(p) for p in left} | {(0, k) for k in range(8, 15)}
    kept = {tuple(p) for p in second.extra["buffer"]["places"]}
    assert {tuple(p) for p in left[:2]} <= kept
    assert len(begun - kept - {tuple(left[-2])}) == WANT


async def test_a_generate_function_may_take_a_group(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    own = rollout(tmp_path, custom_generate_function_path="grouped", group_generate=True)
    batch = await run(replace(plan, rollout=own), servers)
    for group in split_groups(samples_of(plan, batch.files)):
        assert [s.metadata["together"] for s in group] == [[s.seed for s in group]] * N
    own = rollout(tmp_path, custom_generate_function_path="loses_one", group_generate=True)
    with pytest.raises(PluginError, match="returned 1 samples for a group of 2"):
        await run(replace(plan, rollout=own), servers)


def hooks(folder: Path, *names: str) -> dict[str, list[str]]:
    return {"sample_hook_paths": [f"{folder}/mine.py:{name}" for name in names]}


async def test_hooks_are_given_each_sample_in_turn_before_its_reward(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    plain = samples_of(plan, (await run(plan, servers, 3)).files)
    hooked = rollout(tmp_path, **hooks(tmp_path, "says_where", "puts_another"))
    hooked_plan = replace(plan, root=plan.root + "2", rollout=hooked)
    samples = samples_of(hooked_plan, (await run(hooked_plan, servers, 3)).files)
    for sample, was in zip(samples, plain, strict=True):
        # Which sample it is stays, whatever a hook puts in its place.
        told = {"where": [3, False, was.status], "then": "another"}
        masked = {"loss_mask": [0] * was.response_length, "metadata": was.metadata | told}
        assert sample == replace(was, **masked)


async def test_hooks_are_told_of_an_evaluation(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    path = data_file(tmp_path, [{"prompt": "1="}], "eval.jsonl")
    held_out = EvalConfig(datasets=[EvalDataset(name="own", path=path)])
    hooked = rollout(tmp_path, **hooks(tmp_path, "says_where"))
    actor = RolloutActor(replace(plan, rollout=hooked, eval=held_out))
    await actor.set_engines([s.url for s in servers])
    report = await actor.evaluate(1, 5, "a", 0)
    await actor.close()
    assert [s.metadata["where"][:2] for s in samples_of(plan, report.files)] == [[5, True]]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("returns_text", r"sample_hook_paths\[1\] = '.*:returns_text' returned a str on sample 0 "),
        ("first_again", "sample_hook_paths returned one object as two samples"),
        ("cuts_the_mask", r"sample_hook_paths: sample \d: loss_mask has 1 entries for"),
        ("raises", r"sample_hook_paths\[1\] = '.*:raises' raised KeyError: 'mine' on sample 0 "),
    ],
)
async def test_a_hook_that_gives_no_sample_is_named(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path, name: str, fault: str
) -> None:
    own = rollout(tmp_path, **hooks(tmp_path, "says_where", name))
    with pytest.raises((DataError, PluginError), match=fault):
        await run(replace(plan, rollout=own), servers)


async def test_a_sample_that_is_cut_off_has_its_hooks_when_it_is_whole(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    pool = EnginePool([s.url for s in servers], Limits(128, 64))
    own = rollout(tmp_path, **hooks(tmp_path, "says_where"))
    cut = [Sample(prompt_id="p", index=k, tokens=[3, 4 + k], seed=k) for k in range(3)]
    # One is whole from before, one has no budget left.
    cut[1].status, cut[2].status = Status.COMPLETED, Status.ABORTED
    cut[2].tokens, cut[2].response_length = list(range(64)), 60
    tokenizer = AutoTokenizer.from_pretrained(plan.model_folder)
    generator = Generator(own, tokenizer, pool, iteration=2)
    try:
        first, whole, full = await generator.run(cut, 3, None)
        assert first.metadata["where"][0] == 2 and full.metadata["where"][2] == "truncated"
        assert whole.metadata == {}
        servers[0].answer = servers[1].answer = aborts(servers[0])
        pool.aborting = True
        [again] = await generator.run([Sample(prompt_id="p", tokens=[3], seed=9)], 1, None)
        assert again.status == Status.ABORTED and again.metadata == {}
    finally:
        await pool.close()


def aborts(server: Any) -> Any:
    async def answer(request: Request) -> Any:
        body = await request.json()
        pairs = zip(body["input_ids"], body["sampling_params"], strict=True)
        return [server.one(ids, params, "abort") for ids, params in pairs]

    return answer


async def test_rows_have_stop_rules_and_a_generate_function_of_their_own(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1=", "params": {"stop": ["7"], "max_new_tokens": 2}},
        {"prompt": "2=", "generate": f"{tmp_path}/mine.py:own", "rm": "rewards:mine"},
        {"prompt": "3=", "params": {"max_new_tokens": 100}},
        {"prompt": "4="},
    ]
    data = DataConfig(
        path=data_file(tmp_path, rows, "rows.jsonl"),
        shuffle=False,
        sampling_params_key="params",
        generate_function_key="generate",
        custom_rm_key="rm",
    )
    batch = await run(replace(plan, data=data), servers)
    sent = {
        tuple(ids): params
        for server in servers
        for path, body in server.seen
        if path == "/generate"
        for ids, params in zip(body["input_ids"], body["sampling_params"], strict=True)
    }
    by_prompt = {s.prompt: s for s in samples_of(plan, batch.files)}
    assert {p: "by" in s.metadata for p, s in by_prompt.items()} == {
        "1=": False, "2=": True, "3=": False, "4=": False,
    }  # fmt: skip
    assert by_prompt["2="].custom_rm_path == "rewards:mine"
    assert by_prompt["1="].response_length == 2
    budgets = {p: sent[tuple(s.tokens[: s.prompt_length])] for p, s in by_prompt.items()}
    assert [budgets[f"{k}="]["max_new_tokens"] for k in (1, 2, 3, 4)] == [2, 8, 8, 8]
    assert (budgets["1="]["stop"], "stop" in budgets["4="]) == (["7"], False)
    hot = [{"prompt": "1=", "params": {"temperature": 0.5}}]
    data = data.model_copy(update={"path": data_file(tmp_path, hot, "hot.jsonl")})
    with pytest.raises(DataError, match=r"line 1: 'params' sets 'temperature': it changes the pro"):
        await run(replace(plan, data=data), servers)


async def test_an_evaluation_set_has_settings_of_its_own(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    rows = [{"q": "1=", "params": {"temperature": 0.5}}, {"q": "2="}]
    own = EvalDataset(
        name="own",
        path=data_file(tmp_path, rows, "eval.jsonl"),
        input_key="q",
        top_k=7,
        stop=["9"],
        stop_token_ids=[5],
        min_new_tokens=1,
        repetition_penalty=1.5,
        max_response_len=4,
        custom_generate_function_path=f"{tmp_path}/mine.py:own",
        custom_rm_path=f"{tmp_path}/mine.py:reward",
        rm_type="math",
        metadata_overrides={"level": 3},
        temperature=0.25,
    )
    data = plan.data.model_copy(update={"sampling_params_key": "params"})
    actor = RolloutActor(replace(plan, data=data, eval=EvalConfig(datasets=[own])))
    await actor.set_engines([s.url for s in servers])
    report = await actor.evaluate(1, 0, "a", 0)
    await actor.close()
    sent = [
        params
        for server in servers
        for path, body in server.seen
        if path == "/generate"
        for params in body["sampling_params"]
    ]
    assert sorted(p["temperature"] for p in sent) == [0.25, 0.5]
    expected = {
        "top_k": 7, "stop": ["9"], "stop_token_ids": [5], "min_new_tokens": 1,
        "repetition_penalty": 1.5, "max_new_tokens": 4,
    }  # fmt: skip
    assert all(params | expected == params for params in sent)
    for sample in samples_of(plan, report.files):
        assert sample.custom_rm_path == f"{tmp_path}/mine.py:reward"
        assert sample.metadata["level"] == 3 and sample.metadata["rm_type"] == "math"
        assert sample.metadata["by"] == "own"
