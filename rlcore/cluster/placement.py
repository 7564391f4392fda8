"""Where actors compute: one placement group of Ray for a run, a bundle for each GPU.

Invariants:
- GPUs are counted by node and then by number: neighbours in rank are neighbours in a machine.
- Without GPUs, trainer ranks fill `cluster.actor_num_nodes` nodes one after another, the driver's
  first, and engines are spread over the same nodes in order.
- A run on one node listens on loopback alone; over several, engines listen at their node's address.
- Trainer rank r has the r-th GPU. Engines have those behind the trainer's, or, where they share
  them, the same from the first on; an engine of k GPUs has k neighbours: of one node, or as many of
  each of several.
- What is started again goes where it was: the group lasts as long as the run is open.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import groupby
from typing import Any

from rlcore.cluster.nodes import LOOPBACK, Node, computing_nodes, is_alone, this_node
from rlcore.cluster.plan import FleetPlan
from rlcore.cluster.ray_session import call, gather
from rlcore.errors import ClusterError

FREE_PATIENCE_S = 60.0
"""How long GPUs may be in use by others, for instance by a driver that was killed just now."""
PROBE_DEADLINE_S = 300.0
SHARE = 0.4
"""Of its bundle that an actor asks for: a trainer rank and an engine fit in one."""


@dataclass(frozen=True)
class Slot:
    """A GPU of the placement group."""

    bundle: int
    node: Node
    gpu: str
    """Its number there, or its UUID."""


@dataclass(frozen=True)
class Demand:
    """The GPUs that a run asks for, and the nodes of what needs none."""

    trainers: int
    """GPUs of the trainer, one a rank."""
    engines: int
    """GPUs of all engines."""
    each: int
    """GPUs of one engine."""
    colocate: bool
    nodes: int = 1
    """Nodes that ranks and engines without GPUs are spread over."""
    ranks: int = 1
    """Of the trainer, with GPUs or without."""
    servers: int = 1
    """Engines, with GPUs or without."""

    @classmethod
    def of(cls, plan: FleetPlan, *, trainer: bool, engines: bool) -> Demand:
        """What a plan asks for: its trainer, its engines, or both."""
        config = plan.config
        each = config.cluster.rollout_num_gpus_per_engine
        own = engines and not config.rollout.engine_urls
        on_gpus = own and config.rollout.engine != "embedded"
        return cls(
            trainers=config.world_size if trainer and plan.cuda else 0,
            engines=config.num_engines * each if on_gpus else 0,
            each=each,
            colocate=config.cluster.colocate,
            nodes=config.cluster.actor_num_nodes,
            ranks=config.world_size,
            servers=config.num_engines,
        )

    @property
    def total(self) -> int:
        """GPUs of the placement group."""
        if self.colocate:
            return max(self.trainers, self.engines)
        return self.trainers + self.engines

    @property
    def first_of_engines(self) -> int:
        """Where the engines' GPUs begin."""
        return 0 if self.colocate else self.trainers

    def __str__(self) -> str:
        shared = ", which they share," if self.colocate and self.trainers and self.engines else ""
        parts = [
            f"the trainer {self.trainers} (cluster.actor_num_nodes x actor_num_gpus_per_node)"
            if self.trainers
            else "",
            f"the engines {self.engines} (cluster.rollout_num_gpus)" if self.engines else "",
        ]
        return f"{self.total} GPUs{shared}: " + ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Place:
    """Where one actor is put."""

    options: dict[str, Any]
    """Of the actor, as Ray takes them."""
    gpus: tuple[str, ...] | None = None
    """Its GPUs on their node, as CUDA_VISIBLE_DEVICES names them; None: it has none of its own."""
    host: str = LOOPBACK
    """Address that a server of its listens at."""


NOWHERE = Place({"num_gpus": 0})
"""On the CPUs of the only node."""


class Placement:
    """GPUs that are held for a run. `reserve` them, and `release` them in the end."""

    def __init__(
        self,
        demand: Demand,
        nodes: Sequence[Node] = (),
        group: Any = None,
        slots: Sequence[Slot] = (),
    ) -> None:
        self._demand = demand
        self.nodes = nodes
        """That the run's actors are on, in order of rank; none where the cluster has only one."""
        self._group = group
        self._slots = slots

    @classmethod
    async def reserve(cls, demand: Demand, address: str) -> Placement:
        """Hold GPUs, and find out which they are.

        Args:
            demand: how many, for whom.
            address: of the Ray cluster, as the configuration says it.

        Raises:
            ClusterError: the cluster has not as many, or they do not become free.
        """
        if not demand.total:
            return cls(
                demand, [] if is_alone() and demand.nodes == 1 else computing_nodes(demand.nodes)
            )
        import ray
        from ray.util import placement_group, remove_placement_group

        _check(demand, address)
        group = placement_group([{"GPU": 1}] * demand.total, strategy="PACK")
        try:
            began = time.monotonic()
            while not await asyncio.to_thread(group.wait, 1):
                if time.monotonic() - began > FREE_PATIENCE_S:
                    raise ClusterError(
                        f"the run asks for {demand}. They did not become free within "
                        f"{FREE_PATIENCE_S:.0f} s; free of {_gpus(ray.cluster_resources())} are "
                        f"{_gpus(ray.available_resources())}. End what holds them (`ray status` "
                        "shows it), or ask for fewer"
                    )
            slots = await _ordered(group, demand.total)
            nodes = [] if is_alone() else list(dict.fromkeys(slot.node for slot in slots))
            placement = cls(demand, nodes, group, slots)
            placement._check_nodes()
        except BaseException:
            remove_placement_group(group)
            raise
        return placement

    def trainer(self, rank: int) -> Place:
        """Where a rank of the trainer is put."""
        if self._demand.trainers:
            return self._place([self._slots[rank]])
        return self._beside(rank, self._demand.ranks)

    def engine(self, rank: int) -> tuple[Place, ...]:
        """Where an engine is put: a place on each of its nodes."""
        if not self._demand.engines:
            return (self._beside(rank, self._demand.servers),)
        by_node = groupby(self._engine_slots(rank), key=lambda slot: slot.node)
        return tuple(self._place(list(slots)) for _, slots in by_node)

    def worker(self) -> Place:
        """Where the rollout worker is put: on the first node, since it talks to all engines."""
        return self._beside(0, 1)

    def others(self) -> list[Node]:
        """Nodes of the run that this process is not on."""
        mine = this_node()
        return [node for node in self.nodes if node != mine]

    def release(self) -> None:
        """Give the GPUs back. What still runs on them is ended by Ray."""
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None

    def _place(self, slots: Sequence[Slot]) -> Place:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, slots[0].bundle)
        options = {"num_gpus": SHARE, "scheduling_strategy": strategy}
        return Place(options, tuple(slot.gpu for slot in slots), self._host(slots[0].node))

    def _beside(self, number: int, count: int) -> Place:
        """The place of one of `count` actors that need no GPU: as many neighbours on each node."""
        if not self.nodes:
            return NOWHERE
        node = self.nodes[number * len(self.nodes) // count]
        return Place({**NOWHERE.options, **node.options}, host=self._host(node))

    def _host(self, node: Node) -> str:
        """Where a server on a node listens: on loopback, if nobody on another has to reach it."""
        return node.address if len(self.nodes) > 1 else LOOPBACK

    def _engine_slots(self, rank: int) -> Sequence[Slot]:
        first = self._demand.first_of_engines + rank * self._demand.each
        return self._slots[first : first + self._demand.each]

    def _check_nodes(self) -> None:
        for rank in range(self._demand.engines // self._demand.each):
            nodes = Counter(slot.node.address for slot in self._engine_slots(rank))
            if len(set(nodes.values())) > 1:
                raise ClusterError(
                    f"engine {rank} would have its {self._demand.each} GPUs "
                    "(cluster.rollout_num_gpus_per_engine) unevenly on nodes: "
                    + ", ".join(f"{count} of {node}" for node, count in nodes.items())
                    + "; ask for a number that divides a node's GPUs, or is a multiple of them"
                )


def _check(demand: Demand, address: str) -> None:
    import ray

    there = _gpus(ray.cluster_resources())
    if demand.total > there:
        raise ClusterError(
            f"the run asks for {demand}. The Ray cluster ({address}) has {there}; set "
            "cluster.device = 'cpu' and rollout.engine = 'embedded', ask for fewer, or name "
            "another cluster.ray_address"
        )


def _gpus(resources: dict[str, float]) -> int:
    """Whole GPUs."""
    return int(resources.get("GPU", 0.0))


async def _ordered(group: Any, count: int) -> list[Slot]:
    """The bundles by node and GPU: in what order Ray fills them it does not say."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    look = ray.remote(num_cpus=0, num_gpus=SHARE, max_retries=0)(_where)
    asked = [
        look.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote()
        for i in range(count)
    ]
    what = "a look at the GPUs"
    found = await gather(*(call(one, deadline_s=PROBE_DEADLINE_S, what=what) for one in asked))
    slots = [Slot(i, node, gpu) for i, (node, gpu) in enumerate(found)]
    return sorted(
        slots,
        key=lambda slot: (ip_address(slot.node.address), slot.node.id, len(slot.gpu), slot.gpu),
    )


def _where() -> tuple[Node, str]:
    """Node and GPU of the process that runs this."""
    import ray

    [gpu] = ray.get_gpu_ids()
    return this_node(), str(gpu)
