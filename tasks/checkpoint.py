"""Checkpoint: the model as a Hugging Face folder, and the removal of what is no longer kept."""

from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.work import Work
from tasks.stage import stage


@stage("checkpoint", sections=("checkpoint",), retries=2)
async def checkpoint(run: Run, i: int, train: StageRef) -> Work:
    """Write the model after the iteration; then keep the newest `checkpoint.keep_last` of them."""
    return await run.export(i)
