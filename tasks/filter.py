"""Filter: which groups of a scored rollout are trained on."""

from rlcore.config.digest import STAGE_SECTIONS, config_digest
from rlcore.rollout.stored import is_decided
from rlcore.run import Run
from rlcore.store.manifest import StageRef
from rlcore.stored_runs import take
from rlcore.work import Work
from tasks.stage import stage


@stage("filter", sections=STAGE_SECTIONS["filter"], retries=2)
async def select(
    run: Run, i: int, rollout: StageRef, reward: StageRef, taken: StageRef | None = None
) -> Work:
    """Keep or drop whole groups; what is dropped is counted by reason.

    Groups that the rollout chose by the same filter and the same scores are kept as they are. The
    choice of another run (`taken`) is taken as it is.
    """
    if taken is not None:
        return take(run.store, taken)
    batch, scores = run.store.manifest(rollout), run.store.manifest(reward)
    digest = config_digest(run.config, *STAGE_SECTIONS["filter"])
    decided = is_decided(batch.extra, scores.extra, digest)
    return await run.fleet.select(i, rollout=batch.files, scores=scores.files, decided=decided)
