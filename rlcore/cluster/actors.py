"""The actors of a run: how they come up, come back, and end."""

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

from rlcore.cluster.engines import Engines
from rlcore.cluster.placement import Demand, Placement
from rlcore.cluster.plan import FleetPlan, engine_spec, rollout_plan
from rlcore.cluster.ray_session import NAMESPACE, actor_class, call, first_of
from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.shared import check_shared, remove_scratch, share_model
from rlcore.cluster.trainer_actor import TrainerSpec
from rlcore.cluster.trainer_group import TrainerGroup
from rlcore.config import RunConfig
from rlcore.errors import ClusterError
from rlcore.slime.compat.attributes import slime_args_of
from rlcore.starting_model import check_in_place, is_in_place, prepare_model
from rlcore.store.credentials import all_options
from rlcore.train.trainer import Lora

CONTROL_DEADLINE_S = 300.0

Kind = Literal["trainer", "engines", "worker"]
Kinds = tuple[Kind, ...]
KINDS: Kinds = ("trainer", "engines", "worker")
"""The trainer first: it is the last to be ready."""


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
        self._model_there = asyncio.Event()
        self._placement = Placement(Demand(0, 0, 1, False))
        self._mending = asyncio.Lock()
        self._coming: dict[Kind, asyncio.Future[None]] = {}

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

    @property
    def trainer_is_lost(self) -> bool:
        """Whether a rank has died, and the others were ended with it."""
        return self._group is not None and self._group.broken

    async def start(self, first: Kinds) -> str:
        """Begin to bring up the actors of the run's mode, and wait for those of the `first` stage.

        The others begin when those are up: what the first stage waits for shares the cores with
        nothing that it does not.

        Args:
            first: the kinds that the first stage works with.

        Returns:
            The id of the starting model's state.
        """
        plan, config = self._plan, self._plan.config
        demand = Demand.of(plan, trainer=config.trains, engines=config.generates)
        self._placement = await Placement.reserve(demand, config.cluster.ray_address)
        await check_shared(plan, self._placement.nodes)
        if is_in_place(plan.store.objects, plan.store.origin, config.model):
            # Before anything is started that a damaged model would leave behind.
            check_in_place(plan.store.objects, plan.store.origin, config.model, plan.scratch)
            self._model_there.set()
        else:
            first = KINDS
        kinds = kinds_of(config)
        needed = [kind for kind in kinds if kind in first]
        self._begin(needed)
        await self._wait_for_model()
        state = plan.start_state()
        await self.up(*needed)
        self._begin(kind for kind in kinds if kind not in needed)
        return state

    async def up(self, *kinds: Kind) -> None:
        """Wait until actors are up.

        Raises:
            EngineError, ClusterError: one of them did not come up.
        """
        coming = [self._coming[kind] for kind in kinds if kind in self._coming]
        if coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_EXCEPTION)
            for one in done:
                one.result()

    def is_up(self, kind: Kind) -> bool:
        """Whether actors have come up: later they may have died."""
        coming = self._coming.get(kind)
        return coming is None or (coming.done() and coming.exception() is None)

    async def restart_trainer(self) -> None:
        """New ranks in place of those that are gone."""
        self.trainer.kill()
        self.trainer_restarts += 1
        self._coming.pop("trainer", None)
        self._group = await self._new_trainer()

    async def restart_worker(self, gone: Any) -> None:
        """A new rollout worker in place of the one that is gone, if that was not done already."""
        async with self._mending:
            if self.worker is not gone:
                return
            await self._bring_worker()
            if self._engines is not None and self.is_up("engines"):
                await self._set_engines()

    async def end(self) -> None:
        """End all actors, and the servers of the engines."""
        import ray

        for coming in self._coming.values():
            coming.cancel()
        if self._group is not None:
            self._group.kill()
        if self.worker is not None:
            ray.kill(self.worker)
        if self._engines is not None:
            self._engines.end()
        await asyncio.gather(*self._coming.values(), return_exceptions=True)
        if self._placement.nodes:
            remove_scratch(self._placement.others(), self._plan.scratch)
        self._placement.release()

    # --- coming up --------------------------------------------------------------------------------

    def _begin(self, kinds: Iterable[Kind]) -> None:
        """Ray starts processes in the order in which actors are asked for."""
        for kind in kinds:
            bring = {
                "trainer": self._bring_trainer,
                "engines": self._bring_engines,
                "worker": self._bring_worker,
            }[kind]
            self._coming[kind] = asyncio.ensure_future(bring())

    async def _bring_trainer(self) -> None:
        plan = self._plan
        self._group = await self._new_trainer()
        if not self._model_there.is_set():
            # The first rank builds the model, since it has torch loaded already.
            await self._group.prepare_model(plan.store.origin, plan.config.model)
            await share_model(plan, self._placement.nodes)
            self._model_there.set()
        await self._group.load(plan.start_state())
        if plan.config.offloads_train:
            await self._group.offload()

    async def _bring_engines(self) -> None:
        places = [self._placement.engine(rank) for rank in range(self._plan.config.num_engines)]
        self._engines = Engines(engine_spec(self._plan), places)
        await self._model_there.wait()
        if self._plan.config.offloads_train:
            # An engine takes a share of the memory that it finds free.
            await self.up("trainer")
        await self._engines.start()
        await self.up("worker")
        await self._set_engines()

    async def _bring_worker(self) -> None:
        await self._model_there.wait()
        self.worker = (
            actor_class(RolloutActor)
            .options(**self._placement.worker().options)
            .remote(rollout_plan(self._plan))
        )
        ping = self.worker.ping.remote()
        await call(ping, deadline_s=CONTROL_DEADLINE_S, what="the rollout worker")

    async def _wait_for_model(self) -> None:
        """Have the starting model in its folder: built or fetched by whoever is there for it."""
        plan, config = self._plan, self._plan.config
        if self._model_there.is_set():
            return
        if config.trains:
            there = asyncio.ensure_future(self._model_there.wait())
            await first_of(there, self._coming["trainer"])
        else:
            objects, origin = plan.store.objects, plan.store.origin
            await asyncio.to_thread(
                prepare_model, objects, origin, config.model, config.run.seed, plan.scratch
            )
            await share_model(plan, self._placement.nodes)
            self._model_there.set()

    async def _new_trainer(self) -> TrainerGroup:
        self._trainers += 1
        return await start_trainer(self._plan, self._placement, self._trainers)

    async def _set_engines(self) -> None:
        setting = self.worker.set_engines.remote(self.urls)
        await call(setting, deadline_s=CONTROL_DEADLINE_S, what="the rollout worker")


def kinds_of(config: RunConfig) -> Kinds:
    """The actors that a run of this mode has."""
    has = {
        "trainer": config.trains,
        "engines": config.generates,
        "worker": not config.run.train_from,
    }
    return tuple(kind for kind in KINDS if has[kind])


async def start_trainer(plan: FleetPlan, placement: Placement, number: int) -> TrainerGroup:
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
            lora=Lora.of(config.model),
            as_sglang=config.is_on_policy_by_kernels,
            timeout_s=config.train.deadline_s,
            replays_experts=config.rollout.use_rollout_routing_replay,
            slime=slime_args_of(config),
            shares_gpus=config.offloads_train or config.offloads_rollout,
            megatron=config.megatron,
        ),
        places=[placement.trainer(rank) for rank in range(config.world_size)],
        epoch=plan.epoch,
        name=f"{config.run.id}/trainer/{plan.epoch}.{number}",
        namespace=NAMESPACE,
        deadline_s=config.train.deadline_s,
    )
