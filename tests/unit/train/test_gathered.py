"""Weights that stay gathered over the micro-batches of a step change no number."""

from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from tiny_trainers import loaded
from torch.distributed.fsdp import FSDPModule
from toy_batches import random_sequences, shares

from rlcore.config.tree import AlgorithmConfig
from rlcore.train.fsdp.passes import Passes
from rlcore.train.fsdp.trainer import FsdpTrainer

ALGORITHM = AlgorithmConfig(use_kl_loss=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_families.build("qwen3", folder)
    return folder


def trained(folder: Path, **train: Any) -> tuple[Any, list[dict[str, float]], list[int]]:
    """Two batches of two steps with three micro-batches each; how many units were gathered after
    each.
    """
    trainer = loaded(FsdpTrainer, folder, ALGORITHM, **train)
    metrics, left = [], []
    for number in range(2):
        sequences = random_sequences(12, number)
        [batch] = shares(sequences, 1, iteration=number, num_steps=2, micro_batches=3)
        report = trainer.train(f"{number}" if number else "start", f"{number + 1}", batch)
        metrics.append({k: v for k, v in report.metrics.items() if "second" not in k})
        parts = [p for p in trainer._policy.modules() if isinstance(p, FSDPModule)]
        # Sharded again, a unit has DTensors for parameters.
        plain = [p for part in parts for p in part.parameters() if not hasattr(p, "placements")]
        left.append(len(plain))
    return trainer, metrics, left


def test_the_numbers_are_those_without(
    folder: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, numbers, left = trained(folder, precision="bfloat16")
    assert left == [0, 0]

    with monkeypatch.context() as patch:
        patch.setattr("rlcore.train.fsdp.passes.gathered", lambda policy: pytest.fail("kept"))
        trained(folder)
        with pytest.raises(pytest.fail.Exception, match="kept"):
            trained(folder, precision="bfloat16")
    monkeypatch.setattr(FsdpTrainer, "_passes", lambda self, policy: Passes(policy))
    plain, expected, _ = trained(folder, precision="bfloat16")
    speeds = ("tokens_per_s", "tflops", "perf/")
    for got, want in zip(numbers, expected, strict=True):
        assert {k: v for k, v in got.items() if not any(s in k for s in speeds)} == {
            k: v for k, v in want.items() if not any(s in k for s in speeds)
        }
    assert kept.digest() == plain.digest()


def test_an_error_in_the_middle_leaves_nothing_gathered(folder: Path, process_group: None) -> None:
    trainer = loaded(FsdpTrainer, folder, AlgorithmConfig(), precision="bfloat16")
    policy = trainer._policy
    [batch] = shares(random_sequences(4), 1, micro_batches=2)
    [step] = trainer_micros(trainer, batch)

    def loss(micro: Any, answer: Any) -> Any:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        Passes(policy, keeps_gathered=True).accumulate(step, loss, scale=1.0, temperature=1.0)
    assert all(hasattr(p, "placements") for p in policy.parameters())


def trainer_micros(trainer: Any, batch: Any) -> list[Any]:
    from rlcore.algorithms.packing import pack
    from rlcore.train.credit import MicroBatch

    return [
        [
            MicroBatch.of(
                pack(list(micro), step.totals, "token_mean").inputs(), torch.device("cpu")
            )
            for micro in step.micro_batches
        ]
        for step in batch.steps
    ]
