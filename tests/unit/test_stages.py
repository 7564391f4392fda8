"""Stages as Prefect knows them."""

from flows.iteration import checkpoint, evaluate, reward, rollout, select, train, weight_sync

STAGES = (rollout, reward, select, train, weight_sync, evaluate, checkpoint)
NAMES = ["rollout", "reward", "filter", "train", "weight_sync", "evaluate", "checkpoint"]


def test_every_stage_has_its_name_and_a_key_of_its_own() -> None:
    tasks = [vars(stage) for stage in STAGES]
    assert [task["name"] for task in tasks] == NAMES
    assert [task["task_key"].rpartition("-")[0] for task in tasks] == NAMES
