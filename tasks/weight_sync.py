"""Weight sync: the engines get the trained weights and prove that they hold them."""

from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.work import Work
from tasks.stage import stage


@stage("weight_sync", sections=("weights",))
async def weight_sync(run: Run, i: int, train: StageRef) -> Work:
    """Bring every engine to policy version i + 1; fails where an engine's log-probs disagree."""
    return await run.sync_engines(i + 1)
