"""The machines of a Ray cluster that a run uses, and work that is done on each of them.

Invariant: what belongs to no GPU is pinned to a node as soon as the cluster has more than one, so
that whoever talks to it over loopback is on the same node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from rlcore.cluster.ray_session import call, gather
from rlcore.errors import ClusterError

LOOK_DEADLINE_S = 300.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    address: str
    """In Ray's network."""
    id: str
    """Ray's name for it."""

    @property
    def options(self) -> dict[str, Any]:
        """Of an actor or task that is to be there, as Ray takes them."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.id, soft=False)}


def this_node() -> Node:
    """The node that this process is on."""
    import ray
    from ray.util import get_node_ip_address

    return Node(get_node_ip_address(), ray.get_runtime_context().get_node_id())


def computing_nodes(count: int) -> list[Node]:
    """Nodes with CPUs for trainer ranks and engines: the caller's own first, then by address.

    Raises:
        ClusterError: there are not as many.
    """
    import ray

    found = [
        Node(node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    ]
    mine = this_node()
    nodes = sorted(found, key=lambda node: (node != mine, ip_address(node.address), node.id))
    if len(nodes) < count:
        raise ClusterError(
            f"cluster.actor_num_nodes = {count}, but the Ray cluster has {len(nodes)} node(s) with "
            f"CPUs ({', '.join(node.address for node in nodes)}); start Ray on more machines with "
            "`ray start --address`, or ask for fewer"
        )
    return nodes[:count]


def is_alone() -> bool:
    """Whether the cluster has one node only."""
    import ray

    return sum(node["Alive"] for node in ray.nodes()) == 1


async def on_each(nodes: Sequence[Node], work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function once on each node; its results in order.

    Raises:
        SluiceError: the first that it raised.
        ClusterError: a node does not answer.
    """
    import ray

    task = ray.remote(num_cpus=0, max_retries=0)(work)
    return await gather(
        *(
            call(
                task.options(**node.options).remote(*args),
                deadline_s=LOOK_DEADLINE_S,
                what=f"the node {node.address}",
            )
            for node in nodes
        )
    )
