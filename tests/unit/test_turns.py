"""Who holds memory when: what is too much goes before what is missing comes.

Engines and trainer are stand-ins that tell what was asked of them: the real ones are in
`tests/unit/engine/test_memory.py` and `tests/unit/train/test_offload.py`, a whole run in
`tests/flows/test_colocate.py`.
"""

import asyncio
from typing import Any, cast

import pytest

from rlcore.cluster.actors import Actors
from rlcore.cluster.turns import Turns
from rlcore.errors import ClusterError, EngineError

NOTHING, WEIGHTS, ALL = "engines nothing", "engines weights", "engines all"
NAMES = {0: NOTHING, 1: WEIGHTS, 3: ALL}


class Stage:
    """Actors that write down what they are told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.lock = asyncio.Lock()
        self.trainer_is_lost = False
        self.fails: Exception | None = None

    @property
    def engines(self) -> "Stage":
        return self

    @property
    def trainer(self) -> "Stage":
        return self

    async def release(self, keep: frozenset[str]) -> bool:
        assert self.lock.locked()
        self.told.append(f"release but {NAMES[len(keep)]}")
        return not keep

    async def resume(self, tags: frozenset[str]) -> bool:
        self.told.append(f"resume {NAMES[len(tags)]}")
        if self.fails is not None:
            raise self.fails
        return True

    async def offload(self) -> dict[str, float]:
        self.told.append("offload")
        if self.trainer_is_lost:
            raise ClusterError("trainer rank 0 died")
        return {"free_gb_for_rollout": 7.0}

    async def onload(self, *, weights_only: bool) -> dict[str, float]:
        self.told.append("onload weights" if weights_only else "onload")
        return {} if weights_only else {"free_gb_for_training": 5.0}

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


def turns_of(stage: Stage, *, trainer: bool = True, engines: bool = True) -> Turns:
    return Turns(cast(Actors, stage), trainer=trainer, engines=engines)


async def test_memory_goes_before_it_comes() -> None:
    stage = Stage()
    turns = turns_of(stage)
    await turns.generating()
    assert stage.take() == [f"release but {ALL}", f"resume {ALL}"]
    await turns.training()
    assert stage.take() == [f"release but {NOTHING}", "onload"]
    await turns.pushing()
    assert stage.take() == [f"release but {WEIGHTS}", f"resume {WEIGHTS}"]
    await turns.generating()
    assert stage.take() == [f"release but {ALL}", "offload", f"resume {ALL}"]
    await turns.exporting()
    assert stage.take() == [f"release but {WEIGHTS}", "onload weights"]
    await turns.training()
    assert stage.take() == [f"release but {NOTHING}", "onload"]
    await turns.mending()
    await turns.refilling()
    assert stage.take() == [f"release but {ALL}", "offload", f"release but {ALL}", "onload weights"]

    figures = turns.take_figures()
    gb = {name: value for name, value in figures.items() if "gb" in name}
    assert gb == {"memory/free_gb_for_rollout": 7.0, "memory/free_gb_for_training": 5.0}
    moves = ("release", "resume", "resume_weights", "offload", "onload")
    assert figures.keys() - gb.keys() == {f"memory/seconds_{move}" for move in moves}
    assert turns.take_figures() == {}


async def test_what_begins_ahead_is_over_before_the_next_turn() -> None:
    stage = Stage()
    turns = turns_of(stage)
    await turns.training()
    stage.take()
    stage.fails = EngineError("no room")
    turns.begin_pushing()
    with pytest.raises(EngineError, match="no room"):
        await turns.pushing()
    twice = [f"release but {WEIGHTS}", f"resume {WEIGHTS}"]
    assert stage.take() == twice * 2
    await turns.close()


async def test_a_trainer_that_is_lost_holds_nothing_and_a_new_one_all() -> None:
    stage = Stage()
    turns = turns_of(stage)
    await turns.training()
    stage.trainer_is_lost = True
    await turns.generating()
    await turns.generating()
    assert stage.take().count("offload") == 1
    stage.trainer_is_lost = False
    turns.trainer_restarted()
    await turns.training()
    assert "onload" not in stage.take()


@pytest.mark.parametrize(
    ("moves", "told"),
    [
        ({"trainer": False, "engines": False}, []),
        ({"engines": False}, ["onload", "offload"]),
        (
            {"trainer": False},
            [f"release but {NOTHING}", f"release but {ALL}", f"resume {ALL}"],
        ),
    ],
)
async def test_who_keeps_his_memory_is_left_alone(moves: dict[str, Any], told: list[str]) -> None:
    stage = Stage()
    turns = turns_of(stage, **moves)
    await turns.training()
    await turns.generating()
    assert stage.take() == told
