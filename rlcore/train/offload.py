"""A trainer's tensors that wait in the host's memory while others use its device.

Storages are emptied and filled again where they are, so every view of them stays what it was:
FSDP's sharded parameters, the optimizer's moments, a critic, frozen models. What waits is kept in
one flat buffer, pinned for a GPU and used again by the next `put_away` of as many bytes. What is
zero is not kept.

Invariants:
- What comes back is bit for bit what went.
- It is the same code on the CPU, where storages are emptied too: whoever uses a tensor that is away
  would notice there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.errors import TrainError

ALIGNMENT = 256
"""Of each storage within the buffer, in bytes."""


class Parked:
    """Tensors of one device that go to the host's memory together, and come back."""

    def __init__(self) -> None:
        self._host = torch.empty(0, dtype=torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._zeros: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def away(self) -> bool:
        """Whether they are in the host's memory."""
        return bool(self._away or self._zeros)

    def put_away(
        self, tensors: Iterable[Tensor], device: torch.device, zeros: Iterable[Tensor] = ()
    ) -> None:
        """Copy what lies on the device to the host and free it there; nothing may be away yet.

        Args:
            zeros: tensors that hold nothing else; they are freed alone.
        """
        if self.away:
            raise TrainError("tensors are put away that are away already; take them back first")
        for storage in _storages(zeros, device):
            self._zeros.append((storage, storage.nbytes()))
            storage.resize_(0)
        storages = list(_storages(tensors, device))
        if not storages:
            return
        self._reserve(sum(_padded(storage.nbytes()) for storage in storages), device)
        begin, away = 0, []
        with _copies(device):
            for storage in storages:
                place = self._host[begin : begin + storage.nbytes()]
                place.copy_(_bytes(storage, device), non_blocking=True)
                away.append((storage, place))
                begin += _padded(storage.nbytes())
        for storage in storages:
            storage.resize_(0)
        self._away = away

    def take_back(self) -> None:
        """Put all back where it was."""
        for storage, size in self._zeros:
            storage.resize_(size)
            _bytes(storage, storage.device).zero_()
        self._zeros = []
        if not self._away:
            return
        device = self._away[0][0].device
        for storage, place in self._away:
            # Not beside: memory belongs to the stream in which it is taken.
            storage.resize_(len(place))
        with _copies(device):
            for storage, place in self._away:
                _bytes(storage, device).copy_(place, non_blocking=True)
        self._away = []

    def _reserve(self, size: int, device: torch.device) -> None:
        if len(self._host) == size:
            return
        if len(self._host) and device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
        # Before the next is asked for, the last is given back.
        self._host = torch.empty(0, dtype=torch.uint8)
        self._host = torch.empty(size, dtype=torch.uint8)
        if device.type == "cuda":
            _pin(self._host)


class Offload:
    """What of a trainer is on its device: nothing, the weights, or all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = Parked()
        self._rest = Parked()

    @property
    def away(self) -> bool:
        """Whether something is in the host's memory."""
        return self._weights.away or self._rest.away

    def put_away(
        self, weights: Iterable[Tensor], rest: Iterable[Tensor], zeros: Iterable[Tensor]
    ) -> None:
        """Free the device of the policy's weights and of all else, where they lie on it."""
        if not self._rest.away:
            self._rest.put_away(rest, self._device, zeros)
        if not self._weights.away:
            self._weights.put_away(weights, self._device)

    def take_back(self, *, weights_only: bool) -> None:
        """Put the weights back, and all else unless they suffice."""
        self._weights.take_back()
        if not weights_only:
            self._rest.take_back()

    def check(self, *, weights_only: bool = False) -> None:
        """Refuse work for which something is away.

        Raises:
            TrainError: it is.
        """
        if self._weights.away or (self._rest.away and not weights_only):
            raise TrainError(
                "the trainer's memory is in the host's: onload it before the trainer is used"
            )


def own_storages(module: nn.Module) -> None:
    """Give weights on the CPU memory that can be emptied: a loader leaves them mapped to a file."""
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def held_bytes(device: torch.device) -> int:
    """What this process takes of a device's memory; on the CPU, of the machine's."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)


def free_bytes(device: torch.device) -> int:
    """What nobody takes of a device's memory; on the CPU, of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def give_back_cache(device: torch.device) -> None:
    """Free what torch holds of a GPU's memory and nothing uses."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Each storage on the device once."""
    seen: set[int] = set()
    for tensor in tensors:
        # Detached, a DTensor's own part is no copy either.
        whole = tensor.detach()
        own = whole.to_local() if isinstance(whole, DTensor) else whole
        storage = own.untyped_storage()
        if storage.device.type != device.type or not storage.nbytes():
            continue
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """A storage as a flat tensor."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@contextmanager
def _copies(device: torch.device) -> Iterator[None]:
    """Copies beside the device's other work, behind what it was told before; all done after."""
    if device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    side.synchronize()


def _pin(tensor: Tensor) -> None:
    """Have a GPU copy from and to host memory by itself. torch's own pinned memory would round the
    size up to a power of two.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
    if code:
        raise TrainError(
            f"{tensor.numel() / 2**30:.1f} GiB of the host's memory could not be pinned for the "
            f"trainer's tensors (CUDA error {code}); set cluster.offload_train = false, or give "
            "the machine more memory"
        )
