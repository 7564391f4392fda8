"""A trainer in the host's memory: emptied storages, and the same numbers afterwards.

On the CPU the copies and the emptying are those of a GPU (`tests/gpu/test_offload.py`).
"""

from typing import Any

import pytest
import torch

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import TrainError
from rlcore.train.fsdp.state import held
from rlcore.train.offload import Parked
from rlcore.train.trainer import Lora

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference": {"algorithm": AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)},
    "critic": {"algorithm": AlgorithmConfig(advantage_estimator="ppo")},
    "lora": {"lora": Lora(rank=2, alpha=4.0)},
    "optimizer_on_the_cpu": {"optimizer_cpu_offload": True},
}
SEQUENCES = [[1, 2, 3, 4], [5, 6]]


def storages(trainer: Any) -> list[int]:
    """Bytes of all that a trainer should put away."""
    tensors = [*trainer._for_export(), *trainer._for_training()]
    return [held(tensor.detach()).untyped_storage().nbytes() for tensor in tensors]


def test_what_is_put_away_comes_back_where_it_was() -> None:
    whole = torch.arange(1000, dtype=torch.float32)
    view, other = whole[10:20], torch.randn(3, 5).to(torch.bfloat16)
    tensors = [whole, view, other, torch.empty(0)]
    before = [tensor.clone() for tensor in tensors]
    parked = Parked()
    for _ in range(2):
        parked.put_away(tensors, CPU)
        assert parked.away
        assert [t.untyped_storage().nbytes() for t in tensors] == [0, 0, 0, 0]
        with pytest.raises(TrainError, match="away already"):
            parked.put_away(tensors, CPU)
        parked.take_back()
        parked.take_back()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        assert view.data_ptr() == whole.data_ptr() + 40, "a view stays one"
    buffer = parked._host
    parked.put_away(tensors, CPU)
    assert parked._host is buffer, "the buffer is used again"


def test_what_is_zero_is_not_kept_in_the_host_s_memory() -> None:
    parked, zeros = Parked(), torch.zeros(1000)
    view = zeros[10:20]
    parked.put_away([torch.ones(3)], CPU, [zeros, view])
    assert zeros.untyped_storage().nbytes() == 0
    assert len(parked._host) == 256
    parked.take_back()
    assert not zeros.any() and view.data_ptr() == zeros.data_ptr() + 40
    parked.put_away([], CPU, [zeros])
    assert parked.away
    parked.take_back()
    assert not parked.away and zeros.shape == (1000,)


def test_only_what_lies_on_the_device_is_put_away() -> None:
    parked, there = Parked(), torch.ones(4)
    parked.put_away([there], torch.device("cuda"))
    assert torch.equal(there, torch.ones(4))
    assert not parked.away


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_goes_on_bit_for_bit(kind: str, toy: Any, make_trainer: Any) -> None:
    batches = [toy.shares(toy.random_sequences(6, seed=k), 1)[0] for k in range(2)]
    plain, moved = make_trainer(**KINDS[kind]), make_trainer(**KINDS[kind])
    for trainer in (plain, moved):
        trainer.train("start", "one", batches[0])
    digest, log_probs = moved.digest(), moved.log_probs(SEQUENCES)

    moved.offload()
    moved.offload()
    assert set(storages(moved)) == {0}
    for use in (moved.digest, lambda: moved.log_probs(SEQUENCES)):
        with pytest.raises(TrainError, match="onload"):
            use()
    moved.onload(weights_only=True)
    assert moved.log_probs(SEQUENCES) == log_probs
    with pytest.raises(TrainError, match="onload"):
        moved.train("one", "two", batches[1])
    assert moved.dirty is False
    moved.onload()
    moved.onload()
    assert 0 not in storages(moved)
    assert moved.digest() == digest

    plain.train("one", "two", batches[1])
    moved.train("one", "two", batches[1])
    assert moved.digest() == plain.digest()


def test_a_trainer_that_is_away_loads_anew(model_folder: Any, make_trainer: Any) -> None:
    trainer = make_trainer()
    digest = trainer.digest()
    trainer.offload()
    trainer.load(model_folder, "start")
    assert trainer.digest() == digest


@pytest.mark.slow
def test_ranks_go_on_bit_for_bit(toy: Any, two_ranks: Any, model_folder: Any) -> None:
    batches = [toy.shares(toy.random_sequences(8, seed=k), 2) for k in range(2)]
    plain = two_ranks.run(model_folder, batches)
    moved = two_ranks.run(model_folder, batches, offload=True)
    assert [r["log_probs"] for r in moved] == [r["log_probs"] for r in plain]
