"""Train: state before the iteration and a committed batch give the state after it, once."""

import logging

from rlcore.config.digest import STAGE_SECTIONS
from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.work import Work
from tasks.stage import stage

log = logging.getLogger("sluice.train")


@stage("train", sections=STAGE_SECTIONS["train"])
async def train(run: Run, i: int, rollout: StageRef, reward: StageRef, filter: StageRef) -> Work:
    """Take the optimizer steps of one iteration.

    The trainer is first brought to the state before the iteration, whatever it holds: a step that
    was interrupted is thrown away, so none is ever applied twice.
    """
    work = await run.train(i, rollout=rollout, reward=reward, selection=filter)
    if not work.extra["samples"]:
        log.warning("iteration %d: no sample was left to train on; the model stays as it is", i)
    return work
