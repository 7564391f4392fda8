"""Reward: a score for each sample of a committed rollout."""

from rlcore.config.digest import STAGE_SECTIONS, config_digest
from rlcore.rollout.stored import early_scores
from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.stored_runs import take
from rlcore.work import Work
from tasks.stage import stage


@stage("reward", sections=STAGE_SECTIONS["reward"], retries=2)
async def reward(run: Run, i: int, rollout: StageRef, taken: StageRef | None = None) -> Work:
    """Score the samples; those that cannot be scored are marked failed and counted.

    A rollout that sampled until enough groups passed the filter has scored them. Its scores are
    taken as they are, so none is scored twice; and so are those of another run (`taken`).
    """
    if taken is not None:
        return take(run.store, taken)
    batch = run.store.manifest(rollout)
    run.fleet.read_ahead(batch.files)
    digest = config_digest(run.config, *STAGE_SECTIONS["reward"])
    early = early_scores(batch.extra, digest)
    return await run.fleet.score(i, rollout=batch.files, early=early)
