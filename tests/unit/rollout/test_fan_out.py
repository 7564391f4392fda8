"""A generate function that makes several samples of one: whose they are, and that none is lost."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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
from rlcore.engine.launch import EngineProcess
from rlcore.errors import DataError, PluginError
from rlcore.rollout.generate import Generator
from rlcore.rollout.groups import split_executions, split_groups
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
from copy import deepcopy

import numpy as np

from rlcore.rollout.generate import apply_result
from rlcore.sample import Status

KEPT = []
SEEN = pathlib.Path(__file__).with_name("seen")

def several(seed):
    return 1 + seed % 3

async def fan(args, sample, sampling_params):
    made = []
    for k in range(several(sample.seed)):
        part = deepcopy(sample)
        part.tokens = [*sample.tokens, *[5] * k]
        params = sampling_params | {"max_new_tokens": 8 - k}
        apply_result(part, await args.generate(part.tokens, params))
        part.metadata["part"] = k
        part.index, part.seed, part.rollout_id = 77, 0, 3
        made.append(part)
    return made if len(made) > 1 else made[0]

async def fan_group(args, samples, sampling_params):
    pairs = zip(samples, sampling_params)
    return await asyncio.gather(*(fan(args, sample, params) for sample, params in pairs))

async def nothing(args, sample, sampling_params):
    return []

async def twice(args, sample, sampling_params):
    apply_result(sample, await args.generate(sample.tokens, sampling_params))
    return [sample, sample]

async def keeps(args, sample, sampling_params):
    KEPT.append((await twice(args, sample, sampling_params))[0])
    return KEPT[0]

def answers(sample, **fields):
    sample.tokens, sample.response_length, sample.status = [3, 4, 5, 6], 2, Status.COMPLETED
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample

async def half_a_mask(args, sample, sampling_params):
    return answers(sample, loss_mask=[1, 0.5])

async def short_mask(args, sample, sampling_params):
    return answers(sample, loss_mask=[1])

async def no_number(args, sample, sampling_params):
    return answers(sample, rollout_log_probs=[float("nan"), 0.0])

async def an_array(args, sample, sampling_params):
    return answers(sample, tokens=np.array([3, 4, 5, 6]))

async def cut(args, sample, sampling_params):
    sample.metadata["touched"] = True
    made = await fan(args, sample, sampling_params)
    if isinstance(made, list):
        made[-1].status = Status.ABORTED
    return made

async def batch(args, rollout_id, data_source):
    groups = data_source.get_samples(args.rollout_batch_size)
    return list(await asyncio.gather(*(args.generate_group(group) for group in groups)))

async def by_hand(args, rollout_id, data_source):
    groups = await batch(args, rollout_id, data_source)
    return [nested(group) for group in groups]

def nested(group):
    found = {}
    for sample in group:
        found.setdefault(sample.seed, []).append(sample)
    return list(found.values())

async def one_id(args, rollout_id, data_source):
    groups = await batch(args, rollout_id, data_source)
    for sample in (s for group in groups for s in group):
        sample.rollout_id = rollout_id
    return groups

async def unfinished(args, rollout_id, data_source):
    groups = await batch(args, rollout_id, data_source)
    for sample in (s for group in groups for s in group):
        sample.status = Status.ABORTED
    return groups

def count(args, sample):
    sample.metadata["hooked"] = sample.metadata.get("hooked", 0) + 1

def reward(args, sample, **kwargs):
    return float(several(sample.seed))

def at_most_eight(args, samples, **kwargs):
    with SEEN.open("a") as seen:
        seen.write(json.dumps([sample.seed for sample in samples]) + chr(10))
    return len(samples) <= 8, "many"
"""
WANT, N = 4, 4


def data_file(folder: Path, rows: int, name: str = "prompts.jsonl") -> str:
    path = folder / name
    path.write_text(
        "".join(json.dumps({"prompt": f"{d % 10}{d // 10}="}) + "\n" for d in range(rows))
    )
    return str(path)


def rollout(folder: Path, **more: Any) -> RolloutConfig:
    functions = {k: f"{folder}/mine.py:{v}" for k, v in more.items() if k.endswith("_path")}
    base = {
        "rollout_batch_size": WANT,
        "n_samples_per_prompt": N,
        "max_response_len": 8,
        "custom_generate_function_path": f"{folder}/mine.py:fan",
    }
    return RolloutConfig(**base | more | functions)


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path) -> RolloutPlan:
    (tmp_path / "mine.py").write_text(CODE)
    return RolloutPlan(
        run_id="r",
        seed=5,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model_folder),
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path=data_file(tmp_path, 40)),
        rollout=rollout(tmp_path),
        reward=RewardConfig(custom_rm_path=f"{tmp_path}/mine.py:reward"),
        filter=FilterConfig(),
        eval=EvalConfig(),
    )


def samples_of(plan: RolloutPlan, files: Any) -> list[Sample]:
    refs = [FileRef.model_validate(file) for file in files]
    return table_to_samples(read_parts(Objects.open(plan.root), refs))


async def run(
    plan: RolloutPlan, urls: list[str], i: int = 0, cursor: dict[str, Any] | None = None
) -> tuple[StageReport, StageReport]:
    """A rollout and its rewards."""
    actor = RolloutActor(plan)
    await actor.set_engines(urls)
    try:
        made = await actor.rollout(1, i, f"a{i}", cursor, 0)
        early = (made.extra.get("scores") or {}).get("files")
        refs = None if early is None else [FileRef.model_validate(file) for file in early]
        return made, await actor.reward(1, i, f"a{i}", made.files, refs)
    finally:
        await actor.close()


def check_batch(samples: list[Sample], groups: int = WANT) -> None:
    """Whole groups of N executions, each with as many samples as its seed says, in their order."""
    assert [s.index for s in samples] == list(range(len(samples)))
    by_group = split_groups(samples)
    assert [group[0].group_index for group in by_group] == list(range(groups))
    seeds = []
    for group in by_group:
        executions = split_executions(group)
        assert len(executions) == N and len({s.prompt_id for s in group}) == 1
        for execution in executions:
            seed = execution[0].seed or 0
            seeds.append(seed)
            assert len(execution) == 1 + seed % 3 and {s.seed for s in execution} == {seed}
            assert [s.metadata["part"] for s in execution] == list(range(len(execution)))
            first = execution[0].index if len(execution) > 1 else None
            assert {s.rollout_id for s in execution} == {first}
            assert [s.prompt_length for s in execution] == [3 + k for k in range(len(execution))]
    assert len(set(seeds)) == groups * N


async def test_samples_cut_from_one_execution_are_stored_and_scored(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    made, scored = await run(plan, [s.url for s in servers])
    samples = samples_of(plan, made.files)
    check_batch(samples)
    assert len(samples) > WANT * N
    assert {s.metadata["part"] for s in samples} == {0, 1, 2}
    # Each execution counts once, however many samples it has.
    rewards = [1.0 + (e[0].seed or 0) % 3 for e in split_executions(samples)]
    assert scored.metrics["rollout/raw_reward"] == pytest.approx(sum(rewards) / (WANT * N))
    assert scored.metrics["reward/unscored"] == 0
    table = read_parts(Objects.open(plan.root), scored.files)
    assert table["reward"].to_pylist() == [1.0 + (s.seed or 0) % 3 for s in samples]
    again, _ = await run(replace(plan, root=plan.root + "2"), [s.url for s in servers])
    assert again.files[0].sha256 == made.files[0].sha256


async def test_a_real_engine_gives_the_same_samples_again(
    plan: RolloutPlan, engines: list[EngineProcess], real_model: Path, tmp_path: Path
) -> None:
    plan = replace(
        plan,
        model_folder=str(real_model),
        model=ModelConfig(path=str(real_model)),
        rollout=rollout(tmp_path, context_length=32),
    )
    urls = [engine.url for engine in engines]
    batches = []
    for own in (plan, replace(plan, root=plan.root + "2")):
        made, _ = await run(own, urls)
        # What its cache holds by then is the engine's affair.
        samples = [replace(s, prefix_cache_info={}) for s in samples_of(own, made.files)]
        check_batch(samples)
        batches.append(samples)
    assert batches[0] == batches[1]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("nothing", "returned no sample for sample"),
        ("twice", "returned one object as two samples"),
        ("keeps", "keeps' returned one object as two samples"),
        ("half_a_mask", "half_a_mask' returned sample . with loss_mask that is no list of 0 and 1"),
        ("short_mask", "short_mask': sample .: loss_mask has 1 entries for 2 response tokens"),
        ("no_number", "with rollout_log_probs that is no list of finite numbers: .nan"),
        ("an_array", "with tokens that is no list of token ids: array"),
    ],
)
async def test_what_is_no_list_of_samples_is_named(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path, name: str, fault: str
) -> None:
    own = rollout(tmp_path, custom_generate_function_path=name)
    with pytest.raises((DataError, PluginError), match=fault):
        await run(replace(plan, rollout=own), [s.url for s in servers])


async def test_an_execution_that_was_cut_off_is_as_it_was_before(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    pool = EnginePool([s.url for s in servers], Limits(128, 64))
    own = rollout(tmp_path, custom_generate_function_path="cut")
    pending = [
        Sample(group_index=0, index=k, prompt_id="p", tokens=[3, 4], seed=k) for k in range(6)
    ]
    tokenizer = AutoTokenizer.from_pretrained(plan.model_folder)
    try:
        made = await Generator(own, tokenizer, pool).run(pending, N, None)
    finally:
        await pool.close()
    assert [s.index for s in made] == list(range(6)) and len(made) == 6
    for sample in made:
        if (sample.seed or 0) % 3 == 0:
            assert sample.status == Status.COMPLETED and sample.metadata["touched"]
        else:
            origin = Sample(
                group_index=0, index=sample.index, prompt_id="p", tokens=[3, 4], seed=sample.seed
            )
            assert sample == replace(origin, status=Status.ABORTED)


async def test_what_is_left_over_keeps_its_executions(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    urls = [s.url for s in servers]
    sampled = rollout(tmp_path, over_sampling_batch_size=10, partial_rollout=True)
    plan = replace(plan, rollout=sampled)
    made, _ = await run(plan, urls)
    check_batch(samples_of(plan, made.files))
    left = split_groups(samples_of(plan, made.extra["buffer"]["files"]))
    assert [len(split_executions(group)) for group in left] == [N] * 6
    cursor = {**(made.cursor or {}), "buffer": made.extra["buffer"]}
    second, _ = await run(plan, urls, 1, cursor)
    batch = samples_of(plan, second.files)
    check_batch(batch)
    assert second.cursor and second.cursor["next_offset"] <= 10 + 4
    after = samples_of(plan, second.extra["buffer"]["files"])
    # What was whole is there as it was, in the batch or still waiting.
    now = {(s.prompt_id, s.seed, s.metadata.get("part")): s.tokens for s in [*batch, *after]}
    whole = [s for group in left for s in group if s.status in ("completed", "truncated")]
    for sample in whole:
        assert now[sample.prompt_id, sample.seed, sample.metadata["part"]] == sample.tokens


async def test_a_filter_sees_all_samples_and_the_batch_is_filled(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    chosen = FilterConfig(dynamic_sampling_filter_path=f"{tmp_path}/mine.py:at_most_eight")
    sampled = rollout(tmp_path, over_sampling_batch_size=WANT)
    plan = replace(plan, rollout=sampled, filter=chosen)
    made, scored = await run(plan, [s.url for s in servers])
    samples = samples_of(plan, made.files)
    check_batch(samples)
    assert all(len(group) <= 8 for group in split_groups(samples))
    assert scored.extra["scored_by"] == "rollout"
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert all(len(set(group)) == N for group in seen)
    if any(len(group) > 8 for group in seen):
        dropped = split_groups(samples_of(plan, made.extra["dropped"]["files"]))
        assert all(len(group) > 8 for group in dropped)


@pytest.mark.parametrize("name", ["batch", "by_hand"])
async def test_a_rollout_function_gives_them_back(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path, name: str
) -> None:
    own = rollout(tmp_path, custom_rollout_function_path=name)
    made, _ = await run(replace(plan, rollout=own), [s.url for s in servers])
    check_batch(samples_of(plan, made.files))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("one_id", "gives 1 samples of group 0, which has 4"), ("unfinished", "one of which is not")],
)
async def test_a_rollout_function_that_mixes_them_up_is_named(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path, name: str, fault: str
) -> None:
    own = rollout(tmp_path, custom_rollout_function_path=name)
    with pytest.raises(PluginError, match=fault):
        await run(replace(plan, rollout=own), [s.url for s in servers])


async def test_a_function_of_a_group_may_do_it_and_hooks_see_each(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    own = rollout(
        tmp_path,
        custom_generate_function_path="fan_group",
        group_generate=True,
        sample_hook_paths=[f"{tmp_path}/mine.py:count"],
    )
    made, _ = await run(replace(plan, rollout=own), [s.url for s in servers])
    samples = samples_of(plan, made.files)
    check_batch(samples)
    assert {s.metadata["hooked"] for s in samples} == {1}


async def test_an_evaluation_counts_executions(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    held_out = EvalDataset(
        name="own",
        path=data_file(tmp_path, 3, "eval.jsonl"),
        n_samples_per_eval_prompt=N,
        pass_threshold=3.0,
    )
    actor = RolloutActor(replace(plan, eval=EvalConfig(datasets=[held_out])))
    await actor.set_engines([s.url for s in servers])
    report = await actor.evaluate(1, 0, "a", 0)
    await actor.close()
    samples = samples_of(plan, report.files)
    check_batch(samples, groups=3)
    rewards = [1.0 + (e[0].seed or 0) % 3 for e in split_executions(samples)]
    assert report.metrics["eval/own"] == pytest.approx(sum(rewards) / 12)
    right = [reward == 3.0 for reward in rewards]
    assert report.metrics["eval/own/pass@1"] == pytest.approx(sum(right) / 12)
    assert report.metrics["eval/own/pass@4"] == pytest.approx(
        sum(any(right[k : k + N]) for k in (0, N, 2 * N)) / 3
    )
