"""A batch that does not fit: what is told, and that nothing of it is used."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import NEVER_RETRIED, OutOfMemory, TrainError
from rlcore.train.out_of_memory import bytes_of_all, out_of_memory

LOSS = """
import torch

ROOM = 24


def loss(args, batch, logits, sum_of_sample_mean):
    if logits.shape[1] > ROOM:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
    return logits.square().mean() * len(batch["advantages"]), {}
"""
CPU = torch.device("cpu")


def test_sizes_and_settings_are_told_and_nothing_is_applied(
    toy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LOSS)
    algorithm = AlgorithmConfig(
        custom_loss_function_path=f"{tmp_path}/mine.py:loss", use_kl_loss=True, kl_loss_coef=0.1
    )
    trainer, sequences = make_trainer(algorithm=algorithm), toy.random_sequences(6)
    before = trainer.digest()
    with pytest.raises(OutOfMemory) as caught:
        trainer.train("start", "next", toy.shares(sequences, 1)[0])
    said = str(caught.value)
    assert said.startswith("iteration 0: memory ran out on cpu when 20.00 MiB were asked for, ")
    for part in ("GiB being free", "parameters 0.00 GiB", "moments 0.00 GiB", "frozen models 0.00"):
        assert part in said, said
    for setting in ("train.max_tokens_per_gpu = 8192", "train.gradient_checkpointing = true"):
        assert setting in said, said
    assert trainer.digest() == before
    assert trainer.dirty, "FSDP may have stopped amid a pass"

    fresh = make_trainer(algorithm=algorithm)
    report = fresh.train("start", "next", toy.shares(sequences, 1, max_tokens=24)[0])
    assert report.metrics["grad_norm"] > 0


def test_settings_that_are_made_are_not_asked_for() -> None:
    train = TrainConfig(optimizer_cpu_offload=True, max_tokens_per_gpu=64)
    told = out_of_memory(torch.OutOfMemoryError("no room"), {}, CPU, train, "iteration 3")
    assert "optimizer_cpu_offload" not in str(told)
    assert "(no room)" in str(told)
    assert isinstance(told, TrainError)
    assert not isinstance(told, NEVER_RETRIED), "the driver tries once more"


def test_only_what_lies_on_the_device_counts() -> None:
    tensors = [torch.ones(4), None, torch.ones(2, dtype=torch.bfloat16)]
    assert bytes_of_all(tensors, CPU) == 20
    assert bytes_of_all(tensors, torch.device("cuda")) == 0
