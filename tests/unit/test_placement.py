"""GPUs are held in one order, shared where that is asked for, and given back. Ray believes us that
this machine has four.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rlcore.cluster import placement as module
from rlcore.cluster import ray_session
from rlcore.cluster.nodes import Node, this_node
from rlcore.cluster.placement import Demand, Place, Placement, Slot
from rlcore.cluster.shared import _check_seen
from rlcore.errors import ClusterError
from rlcore.net import interface_of, own_address


class Where:
    """An actor that says which GPUs it sees."""

    def gpus(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", partial(ray.init, num_gpus=4))
        assert ray_session.connect("local")
    yield
    ray.shutdown()


@pytest_asyncio.fixture
async def reserve(four_gpus: None) -> AsyncIterator[Any]:
    made: list[Placement] = []

    async def one(*demand: Any) -> Placement:
        made.append(await Placement.reserve(Demand(*demand), "local"))
        return made[-1]

    yield one
    for placement in made:
        placement.release()


async def sees(place: Place) -> str | None:
    import ray

    actor = ray_session.actor_class(Where).options(**place.options).remote()
    try:
        return await ray_session.call(actor.gpus.remote(), deadline_s=60, what="an actor")
    finally:
        ray.kill(actor)


async def test_engines_lie_behind_the_trainer_each_on_neighbours(reserve: Any) -> None:
    placement = await reserve(2, 2, 2, False)
    assert [placement.trainer(rank).gpus for rank in (0, 1)] == [("0",), ("1",)]
    assert [place.gpus for place in placement.engine(0)] == [("2", "3")]
    assert await sees(placement.trainer(1)) == "1"


async def test_a_colocated_engine_has_the_gpus_of_the_ranks(reserve: Any) -> None:
    import ray

    placement = await reserve(4, 4, 2, True)
    places = [place for rank in (0, 1) for place in placement.engine(rank)]
    assert [place.gpus for place in places] == [("0", "1"), ("2", "3")]
    both = [placement.trainer(2), places[1]]
    assert [await sees(place) for place in both] == ["2", "2"]
    assert ray.available_resources().get("GPU", 0) == 0


async def test_what_is_released_can_be_had_again(
    reserve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await reserve(3, 0, 1, False)
    monkeypatch.setattr(module, "FREE_PATIENCE_S", 0.5)
    with pytest.raises(ClusterError, match=r"free of 4 are 1\. End what holds them"):
        await reserve(2, 0, 1, False)
    monkeypatch.setattr(module, "FREE_PATIENCE_S", 60.0)
    waiting = asyncio.ensure_future(reserve(2, 0, 1, False))
    await asyncio.sleep(0.1)
    first.release()
    assert (await waiting).trainer(1).gpus


async def test_more_than_there_are_is_an_error_at_once(reserve: Any) -> None:
    said = r"asks for 6 GPUs: the trainer 4 .*, the engines 2 .*The Ray cluster \(local\) has 4"
    with pytest.raises(ClusterError, match=said):
        await reserve(4, 2, 1, False)


async def test_on_the_only_node_nothing_without_gpus_is_pinned(reserve: Any) -> None:
    placement = await reserve(0, 0, 1, False)
    assert placement.engine(0) == (module.NOWHERE,)
    assert placement.trainer(0) == placement.worker() == module.NOWHERE
    assert placement.others() == []


async def test_more_nodes_than_there_are_is_an_error_at_once(reserve: Any) -> None:
    with pytest.raises(ClusterError, match=r"actor_num_nodes = 2, .* has 1 node\(s\) with CPUs"):
        await reserve(0, 0, 1, False, 2, 4, 2)


@pytest.fixture
def two_nodes(four_gpus: None) -> list[Node]:
    """That which is there, and one that is not."""
    return [this_node(), Node("10.9.8.7", "b" * 56)]


def test_ranks_and_engines_fill_nodes_in_order(two_nodes: list[Node]) -> None:
    placement = Placement(Demand(0, 0, 1, False, nodes=2, ranks=4, servers=3), two_nodes)
    ids = [placement.trainer(rank).options["scheduling_strategy"].node_id for rank in range(4)]
    assert ids == [two_nodes[0].id] * 2 + [two_nodes[1].id] * 2
    hosts = [placement.engine(rank)[0].host for rank in range(3)]
    assert hosts == [two_nodes[0].address] * 2 + [two_nodes[1].address]
    assert placement.worker().options["scheduling_strategy"].node_id == two_nodes[0].id
    assert placement.others() == two_nodes[1:]


def test_a_run_on_one_node_of_many_stays_on_it_and_on_loopback(two_nodes: list[Node]) -> None:
    placement = Placement(Demand(0, 0, 1, False, servers=2), two_nodes[1:])
    for place in (placement.engine(1)[0], placement.worker()):
        assert place.host == "127.0.0.1"
        assert place.options["scheduling_strategy"].node_id == two_nodes[1].id


def test_engines_on_gpus_of_two_nodes_listen_at_their_nodes_addresses(
    two_nodes: list[Node],
) -> None:
    slots = [Slot(i, two_nodes[i // 2], str(i % 2)) for i in range(4)]
    demand = Demand(2, 2, 1, False, nodes=1, ranks=2, servers=2)
    placement = Placement(demand, two_nodes, None, slots)
    assert [placement.engine(rank)[0].host for rank in (0, 1)] == ["10.9.8.7"] * 2


async def test_a_folder_that_a_node_does_not_see_is_named_with_the_node(
    four_gpus: None, tmp_path: Path
) -> None:
    await _check_seen([this_node()], tmp_path, "the folder")
    said = rf"the folder of model\.path is not there on the node 127\.0\.0\.1: {tmp_path}/none"
    with pytest.raises(ClusterError, match=said):
        await _check_seen([this_node()], tmp_path / "none", "the folder of model.path")


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert interface_of(own_address("127.0.0.1")) == "lo"
    assert interface_of("203.0.113.7") is None


def test_an_engine_may_lie_on_several_nodes_with_as_many_gpus_of_each() -> None:
    nodes = [Node(f"10.0.0.{k}", f"{k}" * 56) for k in (1, 2, 3, 4)]
    slots = [Slot(k, nodes[k // 2], str(k % 2)) for k in range(8)]
    even = Placement(Demand(0, 8, 4, False), nodes, object(), slots)
    even._check_nodes()
    assert [[place.gpus for place in even.engine(rank)] for rank in (0, 1)] == [
        [("0", "1"), ("0", "1")],
        [("0", "1"), ("0", "1")],
    ]
    uneven = Placement(Demand(0, 6, 3, False), nodes[:3], object(), slots[:6])
    with pytest.raises(
        ClusterError, match=r"unevenly on nodes: 2 of 10\.0\.0\.1, 1 of 10\.0\.0\.2"
    ):
        uneven._check_nodes()
