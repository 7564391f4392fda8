"""Groups, seeds, plain requests and custom generate functions."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import RolloutConfig
from rlcore.data import Prompt
from rlcore.errors import DataError, EngineError, PluginError
from rlcore.rollout.client import GenerateResult
from rlcore.rollout.generate import (
    GenerateArgs,
    Generator,
    apply_result,
    sample_seed,
    sampling_params,
)
from rlcore.rollout.groups import split_groups
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.supply import make_groups
from rlcore.sample import FINISHED, Sample, Status


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"p{k}", k, f"{k}=", label=k, tokens=[k, 5]) for k in range(n)]


@pytest.fixture
async def pool(servers: list[Any]) -> AsyncIterator[EnginePool]:
    made = EnginePool([s.url for s in servers], Limits(128, 16), pause_s=0.01, timeout_s=5)
    yield made
    await made.close()


def generator(pool: EnginePool, spec: str | None = None, **settings: Any) -> Generator:
    config = RolloutConfig(max_response_len=8, custom_generate_function_path=spec, **settings)
    return Generator(config, "tokenizer", pool)


def test_groups_are_whole_numbered_and_seeded() -> None:
    samples = make_groups(prompts(3), 4, 7, "rollout-0")
    assert [len(g) for g in split_groups(samples)] == [4, 4, 4]
    assert [(s.group_index, s.index) for s in samples] == [(k // 4, k) for k in range(12)]
    assert len({s.seed for s in samples}) == 12
    assert all(s.seed is not None and 0 <= s.seed < 2**31 for s in samples)
    again = make_groups(prompts(3)[1:], 4, 7, "rollout-0")
    assert [s.seed for s in again] == [s.seed for s in samples[4:]]
    assert {s.seed for s in samples}.isdisjoint(
        s.seed for s in make_groups(prompts(3), 4, 7, "rollout-1")
    )


def test_a_prompt_that_comes_twice_in_a_batch_gets_other_seeds() -> None:
    samples = make_groups([*prompts(1), *prompts(1)], 2, 0, "x")
    assert len({s.seed for s in samples}) == 4


def test_a_seed_is_pinned_so_that_no_change_alters_a_run() -> None:
    assert sample_seed(0, "rollout-0", "p", 0) == 1292197654


def test_sampling_parameters_are_those_of_slime() -> None:
    assert sampling_params(RolloutConfig(stop=["x"], stop_token_ids=[3], max_response_len=9)) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 9,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "stop": ["x"],
        "stop_token_ids": [3],
    }


async def test_plain_generation_fills_samples_in_order(
    servers: list[Any], pool: EnginePool
) -> None:
    samples = make_groups(prompts(4), 4, 0, "x")
    done = await generator(pool).run(samples, 4, "0")
    assert [s.index for s in done] == list(range(16))
    for sample in done:
        sample.validate()
        ids = [sample.group_index or 0, 5]
        params = {"sampling_seed": sample.seed, "max_new_tokens": 8}
        assert sample.tokens == ids + servers[0].one(ids, params)["output_ids"]
        assert sample.rollout_log_probs == [-0.5] * 3
        assert sample.status == Status.COMPLETED
        assert sample.weight_versions == ["0"]
        assert sample.loss_mask is None
        assert sample.prefix_cache_info == {"cached_tokens": 1, "total_prompt_tokens": 2}


async def test_samples_that_are_done_are_told_in_order_while_others_are_not(
    pool: EnginePool,
) -> None:
    samples = make_groups(prompts(40), 4, 0, "x")
    pool.concurrency = 32
    told: list[list[int | None]] = []

    def ready(done: Sequence[Sample]) -> None:
        assert all(s.status == Status.COMPLETED and s.response_length for s in done)
        told.append([s.index for s in done])

    await generator(pool).run(samples, 4, "0", ready)
    assert len(told) > 4
    assert [k for one in told for k in one] == list(range(160))
    assert all(len(one) % 4 == 0 for one in told)


async def test_the_context_cuts_the_budget_and_a_full_one_is_an_error(
    servers: list[Any], pool: EnginePool
) -> None:
    long = Prompt("long", 0, "x", tokens=[1] * 12)
    await generator(pool).run(make_groups([long], 2, 0, "x"), 2, "0")
    [sent] = [b for s in servers for path, b in s.seen if path == "/generate"]
    assert [p["max_new_tokens"] for p in sent["sampling_params"]] == [4, 4]
    full = Prompt("full", 0, "x", tokens=[1] * 16)
    with pytest.raises(DataError, match=r"prompt full has 16 tokens.*data\.max_prompt_len"):
        await generator(pool).run(make_groups([full], 2, 0, "x"), 2, "0")


async def test_a_reply_of_another_policy_is_an_error(servers: list[Any], pool: EnginePool) -> None:
    servers[0].version = servers[1].version = "4"
    with pytest.raises(EngineError, match="no engine answers with policy version '5'"):
        await generator(pool).run(make_groups(prompts(1), 2, 0, "x"), 2, "5")
    await generator(pool).run(make_groups(prompts(1), 2, 0, "x"), 2, None)


@pytest.mark.parametrize(("reason", "status"), FINISHED.items())
def test_the_status_comes_from_the_finish_reason(reason: str, status: Status) -> None:
    sample = Sample(tokens=[1])
    apply_result(sample, GenerateResult([2], [-1.0], reason, "t", "0"))
    assert sample.status == status


def test_a_continued_sample_gets_a_mask_and_all_versions() -> None:
    sample = Sample(tokens=[1])
    apply_result(sample, GenerateResult([2], [-1.0], "stop", "a", "0"))
    sample.append_response_tokens([9, 9], trainable=False)
    apply_result(sample, GenerateResult([3], [-2.0], "length", "b", "1"))
    assert sample.tokens == [1, 2, 9, 9, 3]
    assert sample.loss_mask == [1, 0, 0, 1]
    assert sample.rollout_log_probs == [-1.0, 0.0, 0.0, -2.0]
    assert (sample.response, sample.weight_versions) == ("ab", ["0", "1"])
    assert sample.status == Status.TRUNCATED


CUSTOM = """
import asyncio
from rlcore.rollout.generate import apply_result
from rlcore.sample import Sample, Status

async def two_turns(args, sample, sampling_params, evaluation=None):
    assert args.max_response_len == 8 and args.tokenizer == "tokenizer" and evaluation is False
    first = await args.generate(sample.tokens, sampling_params | {"max_new_tokens": 1})
    apply_result(sample, first)
    sample.append_response_tokens([7], trainable=False, text="?")
    params = sampling_params | {"max_new_tokens": 2}
    apply_result(sample, await args.generate(sample.tokens, params))
    sample.group_index = 99
    return sample

async def slime_style(args, sample, sampling_params):
    sample.tokens = [1, 2, 3]
    sample.response_length = 1
    sample.status = Status.COMPLETED
    return sample

async def fails(args, sample, sampling_params):
    if sample.index == 3:
        raise KeyError("tool")
    await asyncio.sleep(5)

async def pending(args, sample, sampling_params):
    return sample

async def empty(args, sample, sampling_params):
    sample.status = Status.COMPLETED
    return sample

async def listed(args, sample, sampling_params):
    return [sample]

async def foreign(args, sample, sampling_params):
    sample.tokens = [999]
    sample.response_length = 1
    sample.status = Status.COMPLETED
    return sample

async def misspelt(args, sample, sampling_params):
    return args.temprature

def not_async(args, sample, sampling_params):
    return sample
"""


async def test_a_custom_function_makes_multi_turn_samples(pool: EnginePool, tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(CUSTOM)
    samples = make_groups(prompts(2), 3, 0, "x")
    done = await generator(pool, f"{tmp_path}/gen.py:two_turns").run(samples, 3, "0")
    assert [(s.group_index, s.index) for s in done] == [(k // 3, k) for k in range(6)]
    assert all(s.loss_mask == [1, 0, 1, 1] for s in done)
    assert all(s.weight_versions == ["0", "0"] for s in done)
    fresh = make_groups(prompts(2), 3, 0, "x")
    done = await generator(pool, f"{tmp_path}/gen.py:slime_style").run(fresh, 3, "0")
    assert all((s.tokens, s.response_length, s.loss_mask) == ([1, 2, 3], 1, None) for s in done)
    assert [s.seed for s in done] == [s.seed for s in samples]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "raised KeyError: 'tool' on sample 3 (prompt p1)"),
        ("pending", "with status pending"),
        ("empty", "as completed but without response tokens"),
        ("listed", "returned sample 0 with status pending"),
        ("foreign", "token ids outside the vocabulary of 128"),
        ("misspelt", "did you mean 'temperature'?"),
        ("not_async", "it must be an `async def not_async"),
    ],
)
async def test_a_custom_function_s_faults_are_told(
    pool: EnginePool, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "gen.py").write_text(CUSTOM)
    with pytest.raises(PluginError) as caught:
        made = generator(pool, f"{tmp_path}/gen.py:{name}")
        await made.run(make_groups(prompts(2), 3, 0, "x"), 3, "0")
    assert said in str(caught.value)
    assert "rollout.custom_generate_function_path" in str(caught.value)


async def test_args_are_read_only_and_offer_the_settings(pool: EnginePool) -> None:
    args = GenerateArgs(RolloutConfig(), "t", pool)
    assert args.limits == Limits(128, 16)
    assert {"temperature", "pool", "tokenizer"} <= set(dir(args))
    with pytest.raises(AttributeError, match="read-only"):
        args.temperature = 2
    assert not hasattr(args, "nothing_like_it")
