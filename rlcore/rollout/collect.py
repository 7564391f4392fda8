"""Groups generated side by side until enough are whole; what is left is cut off.

Invariants:
- Which groups are taken depends on which are whole first; their order does not: it is the plan's.
- When a collection ends, well or not, nothing that it began runs at an engine any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rlcore.rollout.buffer import Group
from rlcore.rollout.pool import EnginePool
from rlcore.sample import Sample

Generate = Callable[[list[Sample]], Awaitable[list[Sample]]]


async def first_whole(
    groups: Sequence[Group], want: int, generate: Generate, pool: EnginePool
) -> tuple[list[Group], list[Group]]:
    """Generate many groups and take those that are whole first.

    Args:
        groups: in the order of the plan; at least `want`.
        want: how many to take.
        generate: fills in the samples of one group.
        pool: the engines that `generate` uses; nobody else uses them meanwhile.

    Returns:
        (those taken, the others as far as they came), both in the order of the plan.

    Raises:
        EngineError, DataError, PluginError: as `generate`; the first that fails ends the others.
    """

    async def one(group: Group) -> Group:
        return Group(group.place, await generate(group.samples))

    tasks = [asyncio.create_task(one(group)) for group in groups]
    order = {task: k for k, task in enumerate(tasks)}
    try:
        taken: list[int] = []
        open_ = set(tasks)
        while len(taken) < want:
            done, open_ = await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            taken += sorted(order[task] for task in done)
        await pool.abort_all(open_)
        made = [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        # Their connections close with them, and an engine ends a request that nobody waits for.
        await asyncio.gather(*tasks, return_exceptions=True)
    chosen = set(taken[:want])
    return (
        [group for k, group in enumerate(made) if k in chosen],
        [group for k, group in enumerate(made) if k not in chosen],
    )
