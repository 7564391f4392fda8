"""Client, rollouts and evaluation against real embedded engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

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
from rlcore.engine.launch import EngineProcess
from rlcore.errors import EngineError
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.teacher import ask_teacher
from rlcore.sample import Sample
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12}


@pytest.fixture
async def client(engines: list[EngineProcess]) -> AsyncIterator[EngineClient]:
    async with EngineClient(engines[0].url, Limits(14, 32)) as made:
        yield made


def requests(n: int) -> list[GenerateRequest]:
    return [GenerateRequest([3 + k % 10, 13], PARAMS | {"sampling_seed": k}) for k in range(n)]


async def test_every_call_of_the_client(client: EngineClient, real_model: Path) -> None:
    assert await client.health()
    assert await client.weight_version() == "0"
    assert await client.server_info()
    results = await client.generate(requests(20))
    assert {r.finish_reason for r in results} <= {"stop", "length"}
    assert all(r.tokens and r.weight_version == "0" for r in results)
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert stopped and all(r.tokens[-1] == 1 for r in stopped)
    [log_probs] = await client.prompt_log_probs([[3, 13, *results[0].tokens]])
    assert log_probs[1:] == pytest.approx(results[0].log_probs, abs=1e-4)
    await client.pause()
    await client.flush_cache()
    await client.update_weights_from_disk(str(real_model), "1")
    await client.resume()
    assert await client.weight_version() == "1"
    again = await client.generate(requests(20))
    assert [r.tokens for r in again] == [r.tokens for r in results]
    with pytest.raises(EngineError, match=r"answered 400|failed"):
        await client.update_weights_from_disk("/nowhere", "2")
    await client.release_memory()
    await client.resume_memory()
    await client.update_weights_from_disk(str(real_model), "0")


async def test_an_abort_ends_a_running_request_with_what_it_has(client: EngineClient) -> None:
    params = PARAMS | {"max_new_tokens": 29, "ignore_eos": True}
    batch = [GenerateRequest([3, 13], params | {"sampling_seed": k}, f"r{k}") for k in range(256)]
    running = asyncio.create_task(client.generate(batch))
    while not running.done():
        await asyncio.sleep(0.01)
        await client.abort()
    reasons = {r.finish_reason for r in await running}
    assert "abort" in reasons


async def test_what_is_generated_depends_on_no_neighbour(engines: list[EngineProcess]) -> None:
    alone = EnginePool([engines[0].url], Limits(14, 32), concurrency=1)
    together = EnginePool([e.url for e in engines], Limits(14, 32))
    one = await alone.generate(requests(12))
    many = await together.generate(requests(60), group=4)
    assert [(r.tokens, r.log_probs) for r in one] == [(r.tokens, r.log_probs) for r in many[:12]]
    await alone.close()
    await together.close()


async def test_the_stages_of_two_iterations(
    engines: list[EngineProcess], real_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(
        "def reward(args, sample):\n    return float(sample.response.startswith(sample.label))\n"
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{d}=", "y": str(d)}) + "\n" for d in range(10)))
    plan = RolloutPlan(
        run_id="r",
        seed=1,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(real_model),
        model=ModelConfig(path=str(real_model)),
        data=DataConfig(path=str(data), label_key="y"),
        rollout=RolloutConfig(
            rollout_batch_size=8,
            n_samples_per_prompt=8,
            max_response_len=6,
            context_length=32,
            skip_special_tokens=True,
        ),
        reward=RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:reward"),
        filter=FilterConfig(dynamic_sampling_filter_path="nonzero_std"),
        eval=EvalConfig(datasets=[EvalDataset(name="greedy", path=str(data))]),
    )
    actor = RolloutActor(plan)
    await actor.set_engines([e.url for e in engines])
    cursor = None
    for iteration in range(2):
        batch = await actor.rollout(1, iteration, "a", cursor, 0)
        scores = await actor.reward(1, iteration, "a", batch.files)
        chosen = await actor.filter(1, iteration, "a", batch.files, scores.files)
        cursor = batch.cursor
    greedy = await actor.evaluate(1, 1, "a", 0)
    await actor.close()
    objects = Objects.open(plan.root)
    samples = table_to_samples(read_parts(objects, batch.files))
    assert len(samples) == 64
    for sample in samples:
        sample.validate()
        assert len(sample.rollout_log_probs or ()) == sample.response_length
    rewards = [r["reward"] for r in read_parts(objects, scores.files).to_pylist()]
    assert rewards == [float(s.response.startswith(s.label)) for s in samples]
    assert 0 < chosen.extra["kept"] < 64
    assert cursor == {"epoch": 0, "offset": 8, "next_epoch": 1, "next_offset": 6, "size": 10}
    assert 0 <= greedy.metrics["eval/greedy/pass@1"] <= 1


async def test_a_teacher_on_an_engine_scores_each_response(engines: list[EngineProcess]) -> None:
    config = RolloutConfig(teacher_url=engines[1].url, request_retries=0)
    async with EngineClient(engines[0].url, Limits(14, 32)) as client:
        results = await client.generate(requests(40))
    samples = [
        Sample(index=k, tokens=[3 + k % 10, 13, *r.tokens], response_length=len(r.tokens))
        for k, r in enumerate(results)
    ]
    samples.append(Sample(tokens=[3, 13]))
    await ask_teacher(samples, config)
    for sample, result in zip(samples, results, strict=False):
        # Both engines hold the same model.
        assert sample.teacher_log_probs == pytest.approx(result.log_probs, abs=1e-4)
    assert samples[-1].teacher_log_probs == []
    with pytest.raises(EngineError, match=r"teacher_url = .*: the teacher does not answer"):
        gone = config.model_copy(update={"teacher_url": "http://127.0.0.1:9"})
        await ask_teacher(samples, gone)
    samples[0].tokens[0] = 99_999
    with pytest.raises(EngineError, match=r"the teacher cannot score sample 0"):
        await ask_teacher(samples, config)


async def test_a_lost_engine_costs_no_sample(engines: list[EngineProcess]) -> None:
    urls = [engine.url for engine in engines]
    pool = EnginePool(urls, Limits(14, 32), concurrency=64, pause_s=0.05)
    expected = await pool.generate(requests(600))
    running = asyncio.create_task(pool.generate(requests(600)))
    await asyncio.sleep(0.1)
    engines[1].stop(timeout=0)
    assert [r.tokens for r in await running] == [r.tokens for r in expected]
    await pool.close()
