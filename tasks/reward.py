"""Reward: a score for each sample of a committed rollout."""

from rlcore.config.digest import STAGE_SECTIONS
from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.work import Work
from tasks.stage import stage


@stage("reward", sections=STAGE_SECTIONS["reward"], retries=2)
async def reward(run: Run, i: int, rollout: StageRef) -> Work:
    """Score the samples; those that cannot be scored are marked failed and counted."""
    files = run.store.manifest(rollout).files
    run.fleet.read_ahead(files)
    return await run.fleet.score(i, rollout=files)
