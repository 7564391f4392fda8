"""Evaluate: the new policy on held-out data sets."""

from rlcore.config.digest import STAGE_SECTIONS
from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.work import Work
from tasks.stage import stage


@stage("evaluate", sections=STAGE_SECTIONS["evaluate"], retries=2)
async def evaluate(run: Run, i: int, policy: StageRef) -> Work:
    """Generate and score responses to every evaluation prompt with policy version i + 1."""
    await run.ensure_engines(i + 1)
    return await run.fleet.evaluate(i)
