"""The actors of a run: how they come up, come back, and end."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from rlcore.cluster.engines import Engines
from rlcore.cluster.plan import FleetPlan, engine_gpus, engine_spec, rollout_plan, trainer_gpus
from rlcore.cluster.ray_session import NAMESPACE, actor_class, call, gather
from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.trainer_actor import TrainerSpec
from rlcore.cluster.trainer_group import TrainerGroup
from rlcore.errors import ClusterError
from rlcore.starting_model import check_in_place, is_in_place, prepare_model
from rlcore.store.credentials import all_options

CONTROL_DEADLINE_S = 300.0


class Actors:
    """Engines, trainer ranks and the rollout worker of one run."""

    def __init__(self, plan: FleetPlan) -> None:
        self.worker: Any = None
        self.trainer_restarts = 0
        """Since the last iteration was committed."""
        self._plan = plan
        self._trainers = 0
        self._engines: Engines | None = None
        self._group: TrainerGroup | None = None

    @property
    def engines(self) -> Engines:
        """The engines."""
        if self._engines is None:
            raise ClusterError("the engines have not been started")
        return self._engines

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines."""
        return self.engines.urls

    @property
    def trainer(self) -> TrainerGroup:
        """The trainer's ranks."""
        if self._group is None:
            raise ClusterError("the trainer has not been started")
        return self._group

    async def start(self) -> str:
        """Bring up all actors.

        Returns:
            The id of the state that the trainer holds, or would hold if the run had one.
        """
        plan, config = self._plan, self._plan.config
        check_gpus(plan)
        objects, origin, model = plan.store.objects, plan.store.origin, config.model
        in_place = is_in_place(objects, origin, model)
        if in_place:
            # Before anything is started that a damaged model would leave behind.
            check_in_place(objects, origin, model)
        # Ray starts processes in the order in which actors are asked for, and the trainer is the
        # last to be ready.
        trainer = asyncio.create_task(self._new_trainer()) if config.trains else None
        await asyncio.sleep(0)
        self._engines = Engines(engine_spec(plan), config.num_engines, engine_gpus(config))
        if not in_place and trainer is not None:
            # The trainer's first rank builds the model, since it has torch loaded already.
            await (await trainer).prepare_model(origin, model)
        elif not in_place:
            await asyncio.to_thread(
                prepare_model, objects, origin, model, config.run.seed, plan.scratch
            )
        state = plan.start_state()
        self.worker = actor_class(RolloutActor).remote(rollout_plan(plan))
        loading = [load(trainer, state)] if trainer is not None else []
        await gather(self._engines.start(), *loading, self._worker_ready())
        await self._set_engines()
        return state

    async def restart_trainer(self) -> None:
        """New ranks in place of those that are gone."""
        self.trainer.kill()
        self.trainer_restarts += 1
        await self._new_trainer()

    async def restart_worker(self) -> None:
        """A new rollout worker in place of the one that is gone."""
        self.worker = actor_class(RolloutActor).remote(rollout_plan(self._plan))
        await self._worker_ready()
        await self._set_engines()

    def end(self) -> None:
        """End all actors, and the servers of the engines."""
        import ray

        if self._group is not None:
            self._group.kill()
        if self.worker is not None:
            ray.kill(self.worker)
        if self._engines is not None:
            self._engines.end()

    async def _new_trainer(self) -> TrainerGroup:
        self._trainers += 1
        self._group = await start_trainer(self._plan, self._trainers)
        return self._group

    async def _worker_ready(self) -> None:
        ping = self.worker.ping.remote()
        await call(ping, deadline_s=CONTROL_DEADLINE_S, what="the rollout worker")

    async def _set_engines(self) -> None:
        setting = self.worker.set_engines.remote(self.urls)
        await call(setting, deadline_s=CONTROL_DEADLINE_S, what="the rollout worker")


async def load(starting: Awaitable[TrainerGroup], state: str) -> None:
    """Have the trainer that is coming up load the starting model."""
    await (await starting).load(state)


def check_gpus(plan: FleetPlan) -> None:
    """The cluster has the GPUs that the actors will ask for: Ray would wait for them for ever.

    Raises:
        ClusterError: it has not.
    """
    import ray

    config = plan.config
    needed = config.world_size * trainer_gpus(config) if plan.cuda and config.trains else 0.0
    needed += config.num_engines * engine_gpus(config)
    there = ray.cluster_resources().get("GPU", 0.0)
    if needed > there:
        raise ClusterError(
            f"engines and trainer ask for {needed:g} GPUs, and the Ray cluster "
            f"({config.cluster.ray_address}) has {there:g}; set cluster.device = 'cpu' and "
            "rollout.engine = 'embedded', ask for fewer, or name another cluster.ray_address"
        )


async def start_trainer(plan: FleetPlan, number: int) -> TrainerGroup:
    """The trainer's ranks, with no model yet; `number` tells them from those started before."""
    config = plan.config
    return await TrainerGroup.start(
        TrainerSpec(
            train=config.train,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            device="cuda" if plan.cuda else "cpu",
            model_folder=str(plan.model_folder),
            storage_root=config.storage.root,
            storage_options=all_options(config.storage),
            scratch=str(plan.scratch),
            trust_remote_code=config.model.trust_remote_code,
            timeout_s=config.train.deadline_s,
        ),
        world_size=config.world_size,
        epoch=plan.epoch,
        name=f"{config.run.id}/trainer/{plan.epoch}.{number}",
        namespace=NAMESPACE,
        num_gpus=trainer_gpus(config) if plan.cuda else 0.0,
        deadline_s=config.train.deadline_s,
    )
