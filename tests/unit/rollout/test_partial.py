"""Over-sampling against engines: what is taken, what is cut off, and how it goes on."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan, StageReport
from rlcore.config.tree import (
    DataConfig,
    EvalConfig,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from rlcore.engine.launch import EngineProcess
from rlcore.errors import EngineError, PluginError
from rlcore.rollout.buffer import Group, read_buffer
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.rollout.collect import collect
from rlcore.rollout.generate import Generator, sampling_params
from rlcore.rollout.groups import split_groups
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.supply import make_groups
from rlcore.sample import Sample, Status
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects

TRIES = 6
"""On a busy machine everything may be finished before it could be cut off."""
WANT, BEGUN, N = 3, 9, 4
SETTINGS: dict[str, Any] = {
    "rollout_batch_size": WANT,
    "over_sampling_batch_size": BEGUN,
    "partial_rollout": True,
    "n_samples_per_prompt": N,
    "max_response_len": 28,
    "context_length": 32,
}


@pytest.fixture
def plan(tmp_path: Path, real_model: Path) -> RolloutPlan:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{d // 10}{d % 10}=", "y": str(d)} for d in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RolloutPlan(
        run_id="r",
        seed=1,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(real_model),
        model=ModelConfig(path=str(real_model)),
        data=DataConfig(path=str(data), label_key="y"),
        rollout=RolloutConfig(**SETTINGS),
        reward=RewardConfig(custom_rm_path="rlcore.rollout.rewards:never"),
        filter=FilterConfig(),
        eval=EvalConfig(),
    )


def with_settings(plan: RolloutPlan, **settings: Any) -> RolloutPlan:
    return replace(plan, rollout=RolloutConfig(**SETTINGS | settings))


class Rollouts:
    """Rollouts one after another, each by an actor of its own: nothing but the store connects
    them.
    """

    def __init__(self, plan: RolloutPlan, urls: list[str]) -> None:
        self.plan, self.urls = plan, urls
        self.objects = Objects.open(plan.root)
        self.report: StageReport | None = None

    def buffer(self) -> list[Group]:
        return read_buffer(self.objects, self.report.extra.get("buffer")) if self.report else []

    async def next(self, i: int, version: int = 0) -> list[list[Sample]]:
        cursor = None
        if self.report is not None:
            cursor = {**(self.report.cursor or {}), "buffer": self.report.extra.get("buffer")}
        actor = RolloutActor(self.plan)
        await actor.set_engines(self.urls)
        self.report = await actor.rollout(1, i, f"a{i}", cursor, version)
        await actor.close()
        return split_groups(table_to_samples(read_parts(self.objects, self.report.files)))


async def load_of(urls: list[str]) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        replies = [(await http.get(f"{url}/get_load")).json()[0] for url in urls]
    return sum(reply["num_reqs"] + reply["num_waiting_reqs"] for reply in replies)


async def four_rollouts(urls: list[str], plan: RolloutPlan) -> tuple[int, list[Sample]]:
    """How many samples were cut off in their middle, and those of the last rollout."""
    rollouts, used, cut = Rollouts(plan, urls), [], 0
    for i in range(4):
        before = rollouts.buffer()
        groups = await rollouts.next(i)
        assert await load_of(urls) == 0
        assert len(groups) == WANT
        after = rollouts.buffer()
        # Where the buffer has whole groups for all of the batch, nothing is begun.
        enough = sum(group.is_whole for group in before) >= WANT
        assert len(after) == (len(before) if enough else BEGUN) - WANT
        assert [g[0].index for g in groups] == [0, N, 2 * N]
        used += [group[0].prompt_id for group in groups]
        now = {s.prompt_id: g for g in [*groups, *(g.samples for g in after)] for s in g}
        for old in before:
            for was, member in zip(old.samples, now[old.samples[0].prompt_id], strict=True):
                assert member.tokens[: len(was.tokens)] == was.tokens
                if was.response_length:
                    assert member.seed == was.seed
                    assert member.rollout_log_probs is not None
                    assert member.rollout_log_probs[: was.response_length] == was.rollout_log_probs
                cut += was.status == Status.ABORTED and was.response_length > 0
        left = {group.samples[0].prompt_id for group in after}
        # The data has 30 prompts, of which at most 3 * 4 + 6 were begun.
        assert len(set(used) | left) == len(used) + len(left) == WANT * (i + 1) + len(left)
    return cut, [s for group in groups for s in group]


async def test_what_was_begun_goes_on_to_what_it_would_have_been(
    engines: list[EngineProcess], plan: RolloutPlan
) -> None:
    urls = [engine.url for engine in engines]
    for attempt in range(TRIES):
        own = replace(plan, root=f"{plan.root}-{attempt}")
        cut, samples = await four_rollouts(urls, own)
        if cut:
            break
    assert cut > 0, "nothing was ever cut off"
    async with EngineClient(urls[0], Limits(14, 32)) as client:
        requests = [
            GenerateRequest(
                s.tokens[: s.prompt_length],
                sampling_params(plan.rollout) | {"sampling_seed": s.seed},
            )
            for s in samples
        ]
        straight = await client.generate(requests)
    assert [s.response_tokens for s in samples] == [r.tokens for r in straight]
    for member, result in zip(samples, straight, strict=True):
        member.validate()
        assert member.rollout_log_probs == pytest.approx(result.log_probs, abs=1e-4)
        assert member.response == result.text


async def test_older_tokens_keep_their_policy_or_are_masked(
    engines: list[EngineProcess], plan: RolloutPlan, real_model: Path
) -> None:
    urls = [engine.url for engine in engines]
    mixed = {}
    try:
        for mask in (False, True):
            own = replace(plan, root=f"{plan.root}-{mask}")
            own = with_settings(own, mask_offpolicy_in_partial_rollout=mask)
            rollouts = Rollouts(own, urls)
            found: list[tuple[int, Sample]] = []
            for i in range(6 * TRIES):
                if i >= 6 and any(len(set(s.weight_versions)) > 1 for _, s in found):
                    break
                for url in urls:
                    async with EngineClient(url) as client:
                        await client.update_weights_from_disk(str(real_model), str(i))
                before = {s.prompt_id: g for g in rollouts.buffer() for s in g.samples}
                for group in await rollouts.next(i, version=i):
                    assert {s.weight_versions[-1] for s in group} <= {str(k) for k in range(i + 1)}
                    for k, member in enumerate(group):
                        old = before.get(member.prompt_id)
                        was = old.samples[k].response_length if old else 0
                        if was:
                            found.append((was, member))
            mixed[mask] = found
    finally:
        for url in urls:
            async with EngineClient(url) as client:
                await client.update_weights_from_disk(str(real_model), "0")
    assert any(len(set(s.weight_versions)) > 1 for _, s in mixed[False])
    assert all(s.effective_response_length == s.response_length for _, s in mixed[False])
    assert all(s.metadata["start_rollout_id"] == int(s.weight_versions[0]) for _, s in mixed[False])
    assert mixed[True]
    for was, member in mixed[True]:
        expected = [0] * was + [1] * (member.response_length - was)
        assert member.loss_mask == expected


async def test_without_partial_rollout_prompts_come_again_with_nothing(
    engines: list[EngineProcess], plan: RolloutPlan
) -> None:
    rollouts = Rollouts(with_settings(plan, partial_rollout=False), [e.url for e in engines])
    used: list[str] = []
    for i in range(3):
        groups = await rollouts.next(i)
        used += [group[0].prompt_id for group in groups]
        assert all(
            s.status == Status.PENDING and not s.response_length
            for g in rollouts.buffer()
            for s in g.samples
        )
        assert rollouts.report
        metrics = rollouts.report.metrics
        assert metrics["rollout/buffer/groups"] == BEGUN - WANT
        assert metrics["rollout/buffer/kept_tokens"] == 0
        assert metrics["rollout/buffer/dropped_tokens"] > 0
    assert len(set(used)) == len(used) == 3 * WANT


# --- with servers that answer as told -------------------------------------------------------------


@pytest.fixture
async def pool(servers: list[Any]) -> AsyncIterator[EnginePool]:
    made = EnginePool([s.url for s in servers], Limits(128, 64), pause_s=0.01, timeout_s=20)
    yield made
    await made.close()


def groups_of(n: int, members: int = 2) -> list[Group]:
    from rlcore.data import Prompt

    prompts = [Prompt(f"p{k}", k, f"{k}=", label=k, tokens=[k, 5]) for k in range(n)]
    made = split_groups(make_groups(prompts, members, 0, "x"))
    return [Group((0, k), samples) for k, samples in enumerate(made)]


class Slow:
    """Makes servers hold back some prompts until all requests are ended, and count them."""

    def __init__(self, servers: list[Any], held: set[int]) -> None:
        self.held, self.aborted, self.running = held, asyncio.Event(), 0
        self.loop = asyncio.get_running_loop()
        self.ended = {server.url: False for server in servers}
        for server in servers:
            server.answer = self.answerer(server)

    def answerer(self, server: Any) -> Any:
        async def answer(request: Request) -> Any:
            if request.url.path == "/abort_request":
                self.ended[server.url] = True
                return ""
            if request.url.path != "/generate":
                return await server._generate(request)
            body = json.loads(await request.body())
            pairs = list(zip(body["input_ids"], body["sampling_params"], strict=True))
            held = any(ids[0] in self.held for ids, _ in pairs)
            self.running += 1
            while held and not self.ended[server.url]:
                await asyncio.sleep(0.005)
            self.running -= 1
            return [server.one(ids, params, "abort" if held else "stop") for ids, params in pairs]

        return answer


async def test_the_first_whole_groups_are_taken_in_the_order_of_the_plan(
    servers: list[Any], pool: EnginePool
) -> None:
    slow = Slow(servers, held={0, 2})
    generator = Generator(RolloutConfig(max_response_len=8), None, pool)
    found = await collect(groups_of(6), 3, lambda samples: generator.run(samples, 2, "0"), pool)
    taken, rest = found.taken, found.rest
    assert slow.running == 0 and not pool.aborting
    assert [g.place[1] for g in taken] == sorted(g.place[1] for g in taken)
    assert not {0, 2} & {g.place[1] for g in taken} and all(g.is_whole for g in taken)
    assert sorted(g.place[1] for g in [*taken, *rest]) == list(range(6))
    by_place = {g.place[1]: g for g in rest}
    for k in (0, 2):
        assert [s.status for s in by_place[k].samples] == [Status.ABORTED] * 2
        assert [s.response_length for s in by_place[k].samples] == [3, 3]


async def test_what_waits_for_an_engine_is_never_sent(servers: list[Any]) -> None:
    pool = EnginePool([servers[0].url], Limits(128, 64), concurrency=4, pause_s=0.01)
    Slow(servers, held=set(range(1, 9)))
    generator = Generator(RolloutConfig(max_response_len=8), None, pool)
    found = await asyncio.wait_for(
        collect(groups_of(9), 1, lambda s: generator.run(s, 2, "0"), pool), 15
    )
    await pool.close()
    taken, rest = found.taken, found.rest
    assert [g.place for g in taken] == [(0, 0)]
    sent = sum(len(b["input_ids"]) for path, b in servers[0].seen if path == "/generate")
    lengths = [s.response_length for g in rest for s in g.samples]
    assert sent == 2 + sum(length > 0 for length in lengths) < 18
    assert all(s.weight_versions == [] for g in rest for s in g.samples if not s.response_length)


async def test_a_failure_ends_the_others(servers: list[Any], pool: EnginePool) -> None:
    Slow(servers, held={0, 1, 2})
    generator = Generator(RolloutConfig(max_response_len=8), None, pool)

    async def generate(samples: list[Sample]) -> list[Sample]:
        if samples[0].group_index == 3:
            raise EngineError("it broke")
        return await generator.run(samples, 2, "0")

    with pytest.raises(EngineError, match="it broke"):
        await asyncio.wait_for(collect(groups_of(4), 2, generate, pool), 15)
    assert len(asyncio.all_tasks()) == 1


async def test_a_sample_without_budget_is_truncated_without_a_request(
    servers: list[Any], pool: EnginePool
) -> None:
    [group] = groups_of(1)
    full, part = group.samples
    for member, length in ((full, 8), (part, 6)):
        member.append_response_tokens([9] * length, [-1.0] * length)
        member.status = Status.ABORTED
        member.weight_versions = ["0"]
    kept = copy.deepcopy(full)

    class Decodes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return f"{len(ids)} tokens"

    generator = Generator(RolloutConfig(max_response_len=8), Decodes(), pool)
    servers[0].version = servers[1].version = "1"
    done = await generator.run([full, part], 2, "1")
    assert done[0] == replace(kept, status=Status.TRUNCATED)
    [sent] = [b for s in servers for path, b in s.seen if path == "/generate"]
    assert sent["input_ids"] == [[0, 5, *[9] * 6]]
    assert sent["sampling_params"][0]["max_new_tokens"] == 2
    assert (done[1].weight_versions, done[1].response) == (["0", "1"], "8 tokens")
    assert await generator.run(done, 2, "2") == done


CUSTOM = """
from rlcore.rollout.generate import apply_result
from rlcore.sample import Status

async def generate(args, sample, sampling_params):
    apply_result(sample, await args.generate(sample.tokens, sampling_params))
    return sample

async def restarts(args, sample, sampling_params):
    sample.tokens = sample.tokens[: sample.prompt_length]
    sample.response_length, sample.rollout_log_probs, sample.loss_mask = 0, None, None
    sample.response, sample.weight_versions = "", []
    return await generate(args, sample, sampling_params)

async def forgets(args, sample, sampling_params):
    await args.generate(sample.tokens, sampling_params)
    return sample
"""


async def test_a_custom_function_hands_back_what_was_cut_off_and_goes_on_with_it(
    servers: list[Any], pool: EnginePool, tmp_path: Path
) -> None:
    (tmp_path / "custom.py").write_text(CUSTOM)
    Slow(servers, held={0})
    config = RolloutConfig(
        max_response_len=8, custom_generate_function_path=f"{tmp_path}/custom.py:generate"
    )
    generator = Generator(config, None, pool)
    found = await collect(groups_of(3), 2, lambda s: generator.run(s, 2, "0"), pool)
    [cut] = [g for g in found.rest if not g.is_whole]
    assert [s.response_length for s in cut.samples] == [3, 3]
    for server in servers:
        server.reset()
        server.version = "1"
    for name, versions in (("generate", ["0", "1"]), ("restarts", ["1"])):
        own = config.model_copy(
            update={"custom_generate_function_path": f"{tmp_path}/custom.py:{name}"}
        )
        done = await Generator(own, None, pool).run(copy.deepcopy(cut.samples), 2, "1")
        assert [s.weight_versions for s in done] == [versions] * 2
        assert [s.response_length for s in done] == [3 * len(versions)] * 2
    own = config.model_copy(
        update={"custom_generate_function_path": f"{tmp_path}/custom.py:forgets"}
    )
    with pytest.raises(PluginError, match="with status pending"):
        await Generator(own, None, pool).run(groups_of(1)[0].samples, 2, "1")
