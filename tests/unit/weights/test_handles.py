"""Weights by handle, with shared memory in the place of a GPU's."""

import asyncio
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlcore.errors import SyncError
from rlcore.weights import handles
from rlcore.weights.handles import HandleTransport, handle_of

READ = """
import base64, pickle, sys
import torch.multiprocessing
packed = pickle.loads(base64.b64decode(sys.stdin.read()))
print(packed["flattened_tensor"].sum().item(), packed["metadata"])
"""


class Flat:
    """Flattens as SGLang's class does, which is not here."""

    def __init__(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._names = [(name, tuple(tensor.shape)) for name, tensor in named_tensors]
        self._whole = torch.cat([tensor.flatten() for _, tensor in named_tensors])

    def get_flattened_tensor(self) -> torch.Tensor:
        return self._whole

    def get_metadata(self) -> list[Any]:
        return self._names


class Engine:
    """Notes what it is sent."""

    def __init__(self) -> None:
        self.got: list[tuple[list[str], str, dict[str, Any]]] = []

    async def update_weights_from_tensor(self, blobs: Any, version: str, **more: Any) -> None:
        self.got.append((blobs, version, more))


@pytest.fixture
def by_name() -> Iterator[None]:
    """Shared memory that a process finds by its name, and not by asking this one."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def test_another_process_reads_the_memory_itself(by_name: None) -> None:
    made = Flat([("a", torch.ones(1000, 500)), ("b", torch.ones(7))])
    handle = handle_of(made)
    assert len(handle) < 1000, "a handle, and no copy"
    made.get_flattened_tensor().add_(1.0)
    done = subprocess.run(
        [sys.executable, "-c", READ], input=handle, capture_output=True, text=True, check=True
    )
    assert done.stdout.split(" ", 1) == ["1000014.0", "[('a', (1000, 500)), ('b', (7,))]\n"]


def test_each_engine_gets_the_handles_of_its_gpus(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "sglang_bucket", lambda: Flat)
    monkeypatch.setattr(handles, "handle_of", lambda flat: str(flat.get_metadata()[0][0]))
    monkeypatch.setattr(handles, "gathered", lambda one: [f"{one}{rank}" for rank in range(4)])
    transport, engines = HandleTransport("7", 8, 2), [Engine(), Engine()]
    tensors = iter([(name, torch.ones(2)) for name in "ab"])
    asyncio.run(transport.send(engines, transport.parts(tensors)))  # type: ignore[arg-type]
    assert [(b, v) for b, v, _ in engines[1].got] == [
        (["a2", "a3"], "7-partial"),
        (["b2", "b3"], "7"),
    ]
    assert engines[0].got[0][2] == {"load_format": "flattened_bucket", "flush_cache": False}
    with pytest.raises(SyncError, match="2 engines of 3 GPUs share those of 4 trainer ranks"):
        few = HandleTransport("7", 8, 3)
        asyncio.run(few.send(engines, few.parts(iter([("a", torch.ones(2))]))))  # type: ignore[arg-type]


def test_a_bucket_and_its_copy_are_all_that_is_held(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, most = 0, 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held, most

        def freed(size: int) -> None:
            nonlocal held
            held -= size

        weakref.finalize(tensor, freed, tensor.nbytes)
        held += tensor.nbytes
        most = max(most, held)
        return tensor

    class Counted(Flat):
        def __init__(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
            super().__init__(named_tensors)
            count(self._whole)

    monkeypatch.setattr(handles, "sglang_bucket", lambda: Counted)
    monkeypatch.setattr(handles, "handle_of", lambda flat: "")
    tensors = ((str(k), count(torch.ones(100))) for k in range(30))
    assert sum(1 for _ in HandleTransport("1", 2000, 1).parts(tensors)) == 6
    # The tensor that did not fit is there already.
    assert most <= 2 * 2000 + 400 and held == 0


def test_without_sglang_it_says_so() -> None:
    with pytest.raises(SyncError, match="needs SGLang beside the trainer"):
        handles.sglang_bucket()
