"""GPUs are held in one order, shared where that is asked for, and given back. Ray believes us that
this machine has four.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from rlcore.cluster import placement as module
from rlcore.cluster import ray_session
from rlcore.cluster.placement import Demand, Place, Placement, Slot
from rlcore.errors import ClusterError


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


async def test_on_cpus_nothing_is_held() -> None:
    placement = await Placement.reserve(Demand(0, 0, 1, False), "local")
    assert placement.engine(0) == (placement.trainer(0),) == (module.NOWHERE,)


def test_an_engine_may_lie_on_several_nodes_with_as_many_gpus_of_each() -> None:
    slots = [Slot(k, f"10.0.0.{1 + k // 2}", str(k % 2)) for k in range(8)]
    even = Placement(Demand(0, 8, 4, False), object(), slots)
    even._check_nodes()
    assert [[place.gpus for place in even.engine(rank)] for rank in (0, 1)] == [
        [("0", "1"), ("0", "1")],
        [("0", "1"), ("0", "1")],
    ]
    uneven = Placement(Demand(0, 6, 3, False), object(), slots[:6])
    with pytest.raises(
        ClusterError, match=r"unevenly on nodes: 2 of 10\.0\.0\.1, 1 of 10\.0\.0\.2"
    ):
        uneven._check_nodes()
