"""Dynamic sampling: groups scored and filtered as they finish, dropped ones replaced, all told."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan, StageReport
from rlcore.config import config_digest
from rlcore.config.tree import (
    DataConfig,
    EvalConfig,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from rlcore.errors import FilterError, RewardError
from rlcore.rollout.buffer import Group
from rlcore.rollout.collect import Collected, Filtering, Judged, collect
from rlcore.rollout.filters import Verdict
from rlcore.rollout.groups import split_groups
from rlcore.rollout.judge import judged_by
from rlcore.rollout.rewards.protocol import Score
from rlcore.rollout.stored import early_scores, is_decided
from rlcore.sample import Sample, Status
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects

REWARD = """
import pathlib

def reward(args, sample, **kwargs):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
        calls.write(f"{sample.prompt_id} {sample.seed}\\n")
    even = int(sample.prompt[0]) % 2 == 0
    return {"score": float(even and sample.seed % 2), "prompt": sample.prompt}

def never(args, sample):
    return 0.0

def broken(args, sample):
    if sample.prompt[0] == "3":
        raise ValueError("no answer found")
    return float(sample.seed)
"""
WANT, BEGUN, N = 4, 6, 8


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path) -> RolloutPlan:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{d % 10}{d // 10}="} for d in range(40)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return RolloutPlan(
        run_id="r",
        seed=5,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model_folder),
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path=str(data)),
        rollout=RolloutConfig(
            rollout_batch_size=WANT,
            over_sampling_batch_size=BEGUN,
            n_samples_per_prompt=N,
            max_response_len=8,
        ),
        reward=RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:reward", reward_key="score"),
        filter=FilterConfig(dynamic_sampling_filter_path="nonzero_std"),
        eval=EvalConfig(),
    )


async def made(plan: RolloutPlan, servers: list[Any]) -> RolloutActor:
    actor = RolloutActor(plan)
    await actor.set_engines([s.url for s in servers])
    return actor


def samples_of(plan: RolloutPlan, files: Any) -> list[Sample]:
    refs = [FileRef.model_validate(file) for file in files]
    return table_to_samples(read_parts(Objects.open(plan.root), refs))


def places(report: StageReport, name: str) -> set[tuple[int, int]]:
    return {(e, o) for e, o in report.extra.get(name, {"places": []})["places"]}


async def test_a_batch_is_filled_and_every_prompt_accounted_for(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    actor = await made(plan, servers)
    before: set[tuple[int, int]] = set()
    cursor: dict[str, Any] | None = None
    for i in range(3):
        batch = await actor.rollout(1, i, f"a{i}", cursor, 0)
        taken = split_groups(samples_of(plan, batch.files))
        assert len(taken) == WANT
        assert all(int(group[0].prompt[0]) % 2 == 0 for group in taken)
        assert all({s.seed % 2 for s in group if s.seed is not None} == {0, 1} for group in taken)
        assert batch.cursor
        size, now = batch.cursor["size"], batch.cursor
        start = now["epoch"] * size + now["offset"]
        passed = {
            divmod(k, size) for k in range(start, now["next_epoch"] * size + now["next_offset"])
        }
        left, dropped = places(batch, "buffer"), places(batch, "dropped")
        assert left | dropped <= passed | before and not left & dropped
        assert len((passed | before) - left - dropped) == WANT
        reasons = batch.extra.get("dropped", {"reasons": []})["reasons"]
        assert set(reasons) <= {"zero_std_0.0", "zero_std_1.0"}
        counted = {k: v for k, v in batch.metrics.items() if "/dynamic_filter/drop_" in k}
        assert sum(counted.values()) == len(reasons) == len(dropped)
        assert batch.metrics["rollout/dynamic_filter/judged_groups"] == WANT + len(dropped)
        if dropped:
            thrown = samples_of(plan, batch.extra["dropped"]["files"])
            assert len(thrown) == len(dropped) * N
            assert all(s.reward == {"score": 0.0, "prompt": s.prompt} for s in thrown)
        cursor, before = {**now, "buffer": batch.extra.get("buffer")}, left
    await actor.close()
    calls = (tmp_path / "calls").read_text().split("\n")[:-1]
    assert len(calls) == len(set(calls)), "a sample was scored twice"


async def test_the_stages_after_it_take_its_scores_and_verdicts(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    actor = await made(plan, servers)
    batch = await actor.rollout(1, 0, "a", None, 0)
    await actor.close()
    calls = (tmp_path / "calls").read_text()
    config = RunConfig(
        model=plan.model,
        data=plan.data,
        rollout=plan.rollout,
        reward=plan.reward,
        filter=plan.filter,
        train={"global_batch_size": WANT * N},
    )
    digests = [config_digest(config, "reward"), config_digest(config, "filter", "reward")]
    assert list(judged_by(plan.reward, plan.filter, filtered=True).values()) == digests
    early = early_scores(batch.extra, digests[0])
    assert early is not None
    # Another worker, as after a crash between the stages.
    again = RolloutActor(plan)
    scores = await again.reward(1, 0, "a", batch.files, early)
    assert is_decided(batch.extra, scores.extra, digests[1])
    chosen = await again.filter(1, 0, "a", batch.files, scores.files, True)
    assert (tmp_path / "calls").read_text() == calls, "something was scored again"
    fresh = await again.reward(1, 0, "b", batch.files)
    assert scores.files[0].sha256 == fresh.files[0].sha256
    assert scores.metrics == fresh.metrics
    own = await again.filter(1, 0, "b", batch.files, fresh.files)
    assert own.files[0].sha256 == chosen.files[0].sha256
    assert chosen.extra == {"kept": WANT * N}
    await again.close()
    # Scores by another reward function are no part of what the rollout decided.
    assert early_scores(batch.extra, "0" * 64) is None
    assert not is_decided(batch.extra, fresh.extra, digests[1])
    assert not is_decided(batch.extra, scores.extra, "0" * 64)


async def test_a_filter_that_never_passes_ends_with_the_counts(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    plan = replace(
        plan,
        reward=RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:never"),
        rollout=plan.rollout.model_copy(update={"max_refills": 2}),
    )
    actor = await made(plan, servers)
    with pytest.raises(FilterError) as caught:
        await actor.rollout(1, 0, "a", None, 0)
    await actor.close()
    said = str(caught.value)
    assert "filter.dynamic_sampling_filter_path = 'nonzero_std' passed 0 of" in said
    assert "by zero_std_0.0" in said and "18 begun" in said and "rollout.max_refills = 2" in said


async def test_failures_to_score_are_counted_over_the_rollout(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    reward = RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:broken")
    plan = replace(plan, reward=reward)
    actor = await made(plan, servers)
    with pytest.raises(RewardError, match="ValueError: no answer found"):
        for i in range(9):
            await actor.rollout(1, i, "a", {"next_epoch": 0, "next_offset": 4 * i, "size": 40}, 0)
    await actor.close()
    lenient = replace(plan, reward=reward.model_copy(update={"max_failed": 1.0}))
    actor = await made(lenient, servers)
    reasons = set()
    for i in range(9):
        cursor = {"next_epoch": 0, "next_offset": 4 * i, "size": 40}
        batch = await actor.rollout(1, i, f"b{i}", cursor, 0)
        reasons |= set(batch.extra.get("dropped", {"reasons": []})["reasons"])
        assert all(s.prompt[0] != "3" for s in samples_of(plan, batch.files))
    await actor.close()
    assert reasons == {"unscored"}


# --- the collection alone -------------------------------------------------------------------------


class NoPool:
    """A pool at which nothing runs."""

    async def abort_all(self, calls: Any) -> None:
        for call in calls:
            call.cancel()
            await asyncio.wait([call])


def group(k: int) -> Group:
    return Group((0, k), [Sample(group_index=k, prompt_id=f"p{k}", label=k)])


async def collected(
    want: int, begun: int, verdict: Any, max_refills: int = 3, judged: list[int] | None = None
) -> Collected:
    """A collection in which group k is done after k turns of the loop."""
    numbers = iter(range(1000))

    def more() -> list[Group]:
        return [group(next(numbers)) for _ in range(begun)]

    async def generate(samples: list[Sample]) -> list[Sample]:
        for _ in range(samples[0].label):
            await asyncio.sleep(0)
        samples[0].status = Status.COMPLETED
        return samples

    async def judge(groups: list[Group]) -> list[Judged]:
        if judged is not None:
            judged.extend(g.place[1] for g in groups)
        await asyncio.sleep(0)
        return [Judged([Score(1.0)], verdict(g.place[1])) for g in groups]

    pool: Any = NoPool()
    filtering = Filtering(judge, more, max_refills, "filter")
    return await asyncio.wait_for(collect(more(), want, generate, pool, filtering), 20)


async def test_nothing_is_judged_that_is_not_used_or_dropped() -> None:
    judged: list[int] = []
    found = await collected(3, 9, lambda k: Verdict(k % 2 == 1, "even"), judged=judged)
    assert sorted(judged) == sorted(g.place[1] for g in [*found.taken, *found.dropped])
    assert [g.place[1] % 2 for g in found.taken] == [1, 1, 1]
    assert found.reasons == {"even": len(found.dropped)}
    assert found.refills == 0
    everything = [*found.taken, *found.dropped, *found.rest]
    assert sorted(g.place[1] for g in everything) == list(range(9))


async def test_more_is_begun_only_when_what_is_in_play_cannot_fill_the_batch() -> None:
    found = await collected(4, 4, lambda k: Verdict(k >= 2, "early"))
    assert (found.refills, len(found.dropped), len(found.rest)) == (1, 2, 2)
    found = await collected(4, 6, lambda k: Verdict(k >= 2, "early"))
    assert (found.refills, len(found.dropped), len(found.rest)) == (0, 2, 0)
    with pytest.raises(FilterError, match=r"passed 3 of 16 groups .*13 by no.*16 begun"):
        await collected(4, 4, lambda k: Verdict(k % 5 == 0 and k, "no"))


async def test_a_group_is_kept_all_the_same_where_it_would_have_to_be_replaced() -> None:
    def fallback(k: int) -> Verdict:
        return Verdict(False, "no", keep_when_insufficient=True)

    found = await collected(4, 6, fallback, max_refills=0)
    assert (len(found.taken), len(found.dropped), found.refills) == (4, 2, 0)


async def test_a_judge_that_fails_ends_all() -> None:
    def fails(k: int) -> Verdict:
        raise RewardError("it broke")

    with pytest.raises(RewardError, match="it broke"):
        await collected(2, 4, fails)
    assert len(asyncio.all_tasks()) == 1
