"""Groups generated without end: what is taken when, what is held, and what survives a kill."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from rlcore.errors import EngineError
from rlcore.rollout.buffer import read_buffer
from rlcore.sample import Sample, Status
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects

WANT, N, ITERATIONS, PATIENCE_S = 3, 2, 5, 60.0


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path) -> RolloutPlan:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{d // 10}{d % 10}="} for d in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RolloutPlan(
        run_id="r",
        seed=1,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model_folder),
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path=str(data), shuffle=False),
        rollout=RolloutConfig(
            rollout_batch_size=WANT,
            n_samples_per_prompt=N,
            max_response_len=8,
            request_retries=0,
            async_buffer_size=1,
            max_staleness=2,
        ),
        reward=RewardConfig(custom_rm_path="rlcore.rollout.rewards:never"),
        filter=FilterConfig(),
        eval=EvalConfig(),
        keep_on_for=ITERATIONS,
    )


class Runs:
    """Rollouts one after another, by actors that may be killed: only the store connects them."""

    def __init__(self, plan: RolloutPlan, server: Any) -> None:
        self.objects = Objects.open(plan.root)
        self.batches: list[list[Sample]] = []
        self.reports: list[StageReport] = []
        self._plan = plan
        self._server = server
        self._actor: RolloutActor | None = None

    async def take(self, *, again: bool = False) -> list[str]:
        """The prompts of the next rollout, or of the last one done again, which then counts."""
        if again:
            self.batches.pop()
            self.reports.pop()
        if self._actor is None:
            self._actor = RolloutActor(self._plan)
            await self._actor.set_engines([self._server.url])
        i, cursor = len(self.reports), None
        if self.reports:
            beside = {name: self.reports[-1].extra.get(name) for name in ("buffer", "source")}
            cursor = (self.reports[-1].cursor or {}) | beside
        self._server.version = str(i)
        attempt = f"a{len(self._server.seen)}-{i}-{again}"
        report = await self._actor.rollout(1, i, attempt, cursor, i)
        self.reports.append(report)
        self.batches.append(table_to_samples(read_parts(self.objects, report.files)))
        return [str(sample.prompt) for sample in self.batches[-1][::N]]

    async def rest(self) -> list[str]:
        """The prompts of all rollouts that are left."""
        return [one for _ in range(ITERATIONS - len(self.reports)) for one in await self.take()]

    async def kill(self) -> None:
        if self._actor is not None:
            await self._actor.close()
        self._actor = None

    def left(self) -> list[Any]:
        return read_buffer(self.objects, self.reports[-1].extra.get("buffer"))

    def check(self) -> None:
        """Every prompt that the cursor has passed is in one batch, or left."""
        seen = Counter(sample.prompt for batch in self.batches for sample in batch[::N])
        seen.update(group.samples[0].prompt for group in self.left())
        cursor = self.reports[-1].cursor
        assert cursor is not None
        assert seen == Counter(prompt(k) for k in range(cursor["next_offset"]))
        starts = [(report.cursor or {})["offset"] for report in self.reports]
        ends = [(report.cursor or {})["next_offset"] for report in self.reports]
        assert starts == [0, *ends[:-1]]


def prompt(k: int) -> str:
    return f"{k // 10}{k % 10}="


def asked(server: Any) -> list[str]:
    """The prompt of each group that the engine was asked for."""
    bodies = [body for path, body in server.seen if path == "/generate"]
    return ["".join(str(t - 3) for t in body["input_ids"][0][:2]) + "=" for body in bodies]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


class Slow:
    """Has an engine keep some prompts until they are let go."""

    def __init__(self, server: Any, *slow: str) -> None:
        self._server, self._slow, self.go = server, slow, threading.Event()
        server.answer = self._answer

    async def _answer(self, request: Request) -> Any:
        body = await request.body()
        ids = json.loads(body)["input_ids"] if request.url.path == "/generate" else [[]]
        text = "".join(str(t - 3) for t in ids[0][:2]) + "="
        while text in self._slow and not self.go.is_set():
            await asyncio.sleep(0.01)
        return await self._server._generate(request)


async def test_generation_goes_on_between_rollouts_within_its_bounds(
    plan: RolloutPlan, server: Any
) -> None:
    runs = Runs(plan, server)
    assert set(await runs.take()) <= {prompt(k) for k in range(6)}
    # Two batches' worth are at the engines or whole while the first is trained on, and no more.
    await until(lambda: len(asked(server)) == 9)
    assert set(await runs.take()) <= {prompt(k) for k in range(9)}
    runs.check()
    assert {version for s in runs.batches[1] for version in s.weight_versions} <= {"0", "1"}
    assert runs.reports[1].metrics["rollout/staleness/max"] <= 1.0
    await runs.rest()
    runs.check()
    await runs.kill()
    # Nothing is begun that no iteration would train on.
    assert runs.left() == []
    assert (runs.reports[-1].cursor or {})["next_offset"] == WANT * ITERATIONS


async def test_a_slow_group_is_waited_for_by_no_rollout(plan: RolloutPlan, server: Any) -> None:
    slow = Slow(server, prompt(1))
    runs = Runs(plan, server)
    assert prompt(1) not in await runs.take()
    [held] = [g for g in runs.left() if g.samples[0].prompt == prompt(1)]
    assert all(s.status == Status.PENDING and not s.response_length for s in held.samples)
    runs.check()
    assert prompt(1) not in await runs.take()
    assert asked(server).count(prompt(1)) == 1, "it is still the first request"
    slow.go.set()
    assert (await runs.rest()).count(prompt(1)) == 1
    runs.check()
    await runs.kill()


async def test_what_was_in_flight_at_a_kill_is_generated_anew(
    plan: RolloutPlan, server: Any
) -> None:
    slow = Slow(server, prompt(1))
    runs = Runs(plan, server)
    await runs.take()
    await until(lambda: len(asked(server)) == 9)
    await runs.kill()
    slow.go.set()
    taken = await runs.take()
    await runs.kill()
    taken += await runs.rest()
    assert taken.count(prompt(1)) == 1
    assert asked(server).count(prompt(1)) >= 2
    runs.check()
    await runs.kill()


async def test_a_group_in_flight_that_grows_too_old_is_begun_anew(
    plan: RolloutPlan, server: Any
) -> None:
    slow = Slow(server, prompt(1))
    runs = Runs(replace(plan, rollout=plan.rollout.model_copy(update={"max_staleness": 1})), server)
    for _ in range(3):
        assert prompt(1) not in await runs.take()
    assert runs.reports[2].metrics["rollout/producer/too_old_groups"] >= 1
    await until(lambda: asked(server).count(prompt(1)) == 2)
    slow.go.set()
    assert (await runs.rest()).count(prompt(1)) == 1
    for i, batch in enumerate(runs.batches):
        assert all(i - int(v) <= 1 for sample in batch for v in sample.weight_versions)
    runs.check()
    await runs.kill()


async def test_a_rollout_done_again_begins_where_the_store_says(
    plan: RolloutPlan, server: Any
) -> None:
    runs = Runs(plan, server)
    await runs.take()
    first = await runs.take()
    assert len(await runs.take(again=True)) == len(first)
    runs.check()
    await runs.take()
    runs.check()
    await runs.kill()


async def test_a_group_that_fails_fails_the_rollout_and_is_not_lost(
    plan: RolloutPlan, server: Any
) -> None:
    runs = Runs(plan, server)
    await runs.take()
    server.says({"error": {"message": "no such token"}}, 400)
    with pytest.raises(EngineError, match="no such token"):
        for _ in range(ITERATIONS):
            await runs.take()
    server.answer = server._generate
    await runs.take()
    runs.check()
    await runs.kill()


async def test_answers_of_the_wrong_policy_are_not_taken(plan: RolloutPlan, server: Any) -> None:
    runs = Runs(plan, server)
    for _ in range(2):
        await runs.take()
    plan = replace(plan, rollout=plan.rollout.model_copy(update={"start_timeout_s": 0.1}))

    async def stale(request: Request) -> Any:
        server.version = "0"
        return await server._generate(request)

    server.answer = stale
    late = Runs(plan, server)
    late.reports, late.batches = list(runs.reports), list(runs.batches)
    await runs.kill()
    with pytest.raises(EngineError, match="policy version '0'"):
        for _ in range(2):
            await late.take()
    await late.kill()
