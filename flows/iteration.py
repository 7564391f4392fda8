"""One RL iteration. This is the loop: each line is a task, each ref a committed artifact."""

from prefect import flow

from rlcore.run import IterationRef, current
from tasks.checkpoint import checkpoint
from tasks.evaluate import evaluate
from tasks.filter import select
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.train import train
from tasks.weight_sync import weight_sync


@flow(name="rl-iteration", flow_run_name="{run_id}-it{i:06d}", retries=0, persist_result=False)
async def iteration(run_id: str, i: int) -> IterationRef:
    """Roll out, score, filter, train, sync; evaluate and checkpoint when due; commit.

    Killed anywhere and called again, it goes on from the first stage that was not committed.
    """
    run = current(run_id)
    if (done := run.committed(i)) is not None:
        return done

    batch = await rollout(run_id, i, policy=run.policy_before(i))
    scores = await reward(run_id, i, rollout=batch)
    chosen = await select(run_id, i, rollout=batch, reward=scores)
    state = await train(run_id, i, rollout=batch, reward=scores, filter=chosen)
    policy = await weight_sync(run_id, i, train=state)

    stages = {
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
    return await run.commit(i, stages)
