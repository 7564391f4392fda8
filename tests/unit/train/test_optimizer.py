"""Schedules, clipping, and AdamW against torch's own on whole tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config.tree import TrainConfig
from rlcore.train.fsdp.optimizer import ShardedAdamW
from rlcore.train.rates import clip_scale, learning_rate


def course(total: int, **settings: Any) -> list[float]:
    config = TrainConfig(lr=1.0, **settings)
    return [learning_rate(step, total, config) for step in range(total)]


def test_learning_rates() -> None:
    assert course(4) == [1.0] * 4
    assert course(5, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert course(5, lr_schedule="linear", lr_min=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = course(7, lr_schedule="cosine", lr_warmup_steps=2, lr_min=0.1)
    assert cosine == pytest.approx([0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)
    beyond = learning_rate(99, 7, TrainConfig(lr=1.0, lr_schedule="cosine", lr_min=0.1))
    assert beyond == pytest.approx(0.1)


def test_clipping() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == pytest.approx(0.25, rel=1e-5)


def test_steps_are_those_of_torch_adamw(process_group: None) -> None:
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    other.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    config = TrainConfig(weight_decay=0.1, clip_grad=0.5)
    ours = ShardedAdamW(list(model.named_parameters()), config)
    groups = [
        {"params": [other.weight], "weight_decay": 0.1},
        {"params": [other.bias], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8)
    for step in range(3):
        x = torch.randn(4, 5)
        for network in (model, other):
            network(x).square().sum().backward()
        norm = ours.collect_gradients()
        expected = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        assert norm == pytest.approx(expected.item(), rel=1e-6)
        lr = 0.1 * (step + 1)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        theirs.zero_grad()
        ours.step(lr, clip_scale(norm, 0.5))
    for mine, reference in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), reference.detach(), atol=1e-6, rtol=1e-6)  # type: ignore[attr-defined]


def test_steps_on_the_cpu_are_the_same_and_go_on_from_a_state(
    toy: Any, make_trainer: Any, tmp_path: Path
) -> None:
    one, two = (toy.shares(toy.random_sequences(5, seed=k), 1)[0] for k in (1, 2))
    plain = make_trainer()
    plain.train("start", "a", one)
    plain.save_state(tmp_path / "a")
    plain.train("a", "b", two)
    aside = make_trainer(optimizer_cpu_offload=True)
    aside.train("start", "a", one)
    aside.train("a", "b", two)
    assert aside.digest() == plain.digest()
    resumed = make_trainer(optimizer_cpu_offload=True)
    resumed.load_state(tmp_path / "a", "a")
    resumed.train("a", "b", two)
    assert resumed.digest() == plain.digest()
    for name, moment in aside._optimizer.moments():
        assert moment.to_local().device.type == "cpu", name
