"""One iteration. This is the loop: each line is a task, each ref a committed artifact.

Each mode (`run.mode`) is a composition of the same tasks: a function of this file.
"""

from collections.abc import Awaitable, Callable

from prefect import flow

from rlcore.run import IterationRef, Run, current
from rlcore.store.manifest import StageRef
from tasks.checkpoint import checkpoint
from tasks.evaluate import evaluate
from tasks.filter import select
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.train import train
from tasks.weight_sync import weight_sync

Stages = dict[str, StageRef]


@flow(name="rl-iteration", flow_run_name="{run_id}-it{i:06d}", retries=0, persist_result=False)
async def iteration(run_id: str, i: int) -> IterationRef:
    """Run the stages that the run's mode has; commit.

    Killed anywhere and called again, it goes on from the first stage that was not committed.
    """
    run = current(run_id)
    if (done := run.committed(i)) is not None:
        return done
    return await run.commit(i, await MODES[run.config.run.mode](run, run_id, i))


async def synchronous(run: Run, run_id: str, i: int) -> Stages:
    """Roll out, score, filter, train, sync; evaluate and checkpoint when due."""
    batch = await rollout(run_id, i, policy=run.policy_before(i))
    scores = await reward(run_id, i, rollout=batch)
    chosen = await select(run_id, i, rollout=batch, reward=scores)
    state = await train(run_id, i, rollout=batch, reward=scores, filter=chosen)
    policy = await weight_sync(run_id, i, train=state)

    stages: Stages = {
        "rollout": batch,
        "reward": scores,
        "filter": chosen,
        "train": state,
        "weight_sync": policy,
    }
    if run.eval_due(i):
        stages["evaluate"] = await evaluate(run_id, i, policy=policy)
    if run.checkpoint_due(i):
        stages["checkpoint"] = await checkpoint(run_id, i, train=state)
    return stages


async def asynchronous(run: Run, run_id: str, i: int) -> Stages:
    """The same, while the rollouts after this one are made by the policy before."""
    batch = await rollout(run_id, i, policy=run.policy_before(i))
    run.begin_ahead(i)
    scores = await reward(run_id, i, rollout=batch)
    chosen = await select(run_id, i, rollout=batch, reward=scores)
    state = await train(run_id, i, rollout=batch, reward=scores, filter=chosen)

    stages: Stages = {"rollout": batch, "reward": scores, "filter": chosen, "train": state}
    if run.sync_due(i):
        await run.generated_ahead()
    return await when_due(run, run_id, i, stages)


async def fully_asynchronous(run: Run, run_id: str, i: int) -> Stages:
    """Take what is whole of what is generated without end, train, change weights under way."""
    batch = await rollout(run_id, i, policy=run.policy_before(i))
    scores = await reward(run_id, i, rollout=batch)
    chosen = await select(run_id, i, rollout=batch, reward=scores)
    state = await train(run_id, i, rollout=batch, reward=scores, filter=chosen)

    stages: Stages = {"rollout": batch, "reward": scores, "filter": chosen, "train": state}
    return await when_due(run, run_id, i, stages)


async def when_due(run: Run, run_id: str, i: int, stages: Stages) -> Stages:
    """Sync, evaluate and checkpoint after a training step, each when it is due."""
    state = stages["train"]
    if run.sync_due(i):
        stages["weight_sync"] = await weight_sync(run_id, i, train=state)
    if run.eval_due(i):
        stages["evaluate"] = await evaluate(run_id, i, policy=stages["weight_sync"])
    if run.checkpoint_due(i):
        stages["checkpoint"] = await checkpoint(run_id, i, train=state)
    return stages


async def rollout_only(run: Run, run_id: str, i: int) -> Stages:
    """Roll out by the starting model, score, filter; there is no trainer."""
    batch = await rollout(run_id, i, policy=None)
    scores = await reward(run_id, i, rollout=batch)
    chosen = await select(run_id, i, rollout=batch, reward=scores)
    return {"rollout": batch, "reward": scores, "filter": chosen}


async def train_only(run: Run, run_id: str, i: int) -> Stages:
    """Take the batch of another run, train; checkpoint when due. There are no engines."""
    stored = run.stored_batch(i)
    batch = await rollout(run_id, i, taken=stored["rollout"])
    scores = await reward(run_id, i, rollout=batch, taken=stored["reward"])
    chosen = await select(run_id, i, rollout=batch, reward=scores, taken=stored["filter"])
    return await learn(run, run_id, i, {"rollout": batch, "reward": scores, "filter": chosen})


async def supervised(run: Run, run_id: str, i: int) -> Stages:
    """Take the next rows of the data set, train; checkpoint when due. There are no engines."""
    batch = await rollout(run_id, i)
    scores = await reward(run_id, i, rollout=batch)
    chosen = await select(run_id, i, rollout=batch, reward=scores)
    return await learn(run, run_id, i, {"rollout": batch, "reward": scores, "filter": chosen})


async def learn(run: Run, run_id: str, i: int, batch: Stages) -> Stages:
    """Train on a batch; checkpoint when due."""
    state = await train(run_id, i, **batch)
    stages: Stages = batch | {"train": state}
    if run.checkpoint_due(i):
        stages["checkpoint"] = await checkpoint(run_id, i, train=state)
    return stages


MODES: dict[str, Callable[[Run, str, int], Awaitable[Stages]]] = {
    "sync": synchronous,
    "async": asynchronous,
    "fully-async": fully_asynchronous,
    "debug-rollout-only": rollout_only,
    "debug-train-only": train_only,
    "sft": supervised,
}
