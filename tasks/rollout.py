"""Rollout: the iteration's prompts and the policy's responses to them."""

from rlcore.config.digest import STAGE_SECTIONS
from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.stored_runs import take
from rlcore.work import Work
from tasks.stage import stage


@stage("rollout", sections=STAGE_SECTIONS["rollout"], retries=2)
async def rollout(
    run: Run, i: int, policy: StageRef | None = None, taken: StageRef | None = None
) -> Work:
    """Generate n responses to each of the iteration's prompts with policy version i.

    Args:
        run: the open run.
        i: iteration; its policy is the model after i iterations of training.
        policy: the weight sync that made the policy; None for the starting model.
        taken: the rollout of another run, to be this one's instead.
    """
    if taken is not None:
        return take(run.store, taken)
    return await run.generate(i)
