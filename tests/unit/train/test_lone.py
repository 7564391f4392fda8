"""Gradients of a rank alone: the same numbers, without a copy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlcore.train.fsdp.lone import InPlace
from rlcore.train.fsdp.model import shard


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def sharded(precision: Any = "float32") -> nn.Sequential:
    module = layers()
    shard(module, list(module), init_device_mesh("cpu", (1,)), precision)
    assert all(isinstance(part, FSDPModule) for part in module.modules())
    return module


def local(gradient: Any) -> Tensor:
    found: Tensor = gradient.to_local()
    return found


NEAR = {"float32": (1e-5, 1e-6), "bfloat16": (0.05, 1.0)}


@pytest.mark.parametrize("precision", NEAR)
def test_gradients_stay_where_they_were_put_and_add_up(
    process_group: None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[Tensor] = []
    allocate = InPlace.allocate

    def seen(self: InPlace, size: Any, **kind: Any) -> Tensor:
        buffers.append(allocate(self, size, **kind))
        return buffers[-1]

    monkeypatch.setattr(InPlace, "allocate", seen)
    plain, module = layers(), sharded(precision)
    rtol, atol = NEAR[precision]
    for _ in range(3):
        draw = torch.randn(5, 4)
        plain(draw).square().sum().backward()
        module(draw).square().sum().backward()
        for ours, want in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(local(ours.grad), want.grad, rtol=rtol, atol=atol)
    assert len(buffers) == 6 and all(buffers[k] is buffers[k + 1] for k in (0, 2, 4))
    begin = buffers[0].untyped_storage().data_ptr()
    assert {local(p.grad).untyped_storage().data_ptr() for p in module.parameters()} == {begin}


def test_what_an_error_parted_is_copied(process_group: None) -> None:
    module = sharded()
    comm = InPlace()
    for part in module.modules():
        part.set_custom_reduce_scatter(comm)  # type: ignore[operator]
    # A buffer that was asked for and never reduced: of another size, and of this one.
    for size in ((7,), (23,)):
        comm.allocate(size, dtype=torch.float32, device=torch.device("cpu")).fill_(9.0)
        plain, draw = layers(), torch.randn(5, 4)
        plain(draw).sum().backward()
        module.zero_grad()
        module(draw).sum().backward()
        for ours, want in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(local(ours.grad), want.grad)


def test_the_second_buffer_is_the_first() -> None:
    comm, cpu = InPlace(), torch.device("cpu")
    first = comm.allocate((4,), dtype=torch.float32, device=cpu)
    assert comm.allocate((4,), dtype=torch.float32, device=cpu) is first
    third = comm.allocate((4,), dtype=torch.float32, device=cpu)
    assert third.data_ptr() != first.data_ptr()
    assert comm.allocate((4,), dtype=torch.bfloat16, device=cpu).dtype == torch.bfloat16
