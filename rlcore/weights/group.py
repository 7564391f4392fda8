"""A process group for weights: rank 0 of the trainer sends, every rank of every engine receives.

It stands beside torch's default group and is known to nobody else: the trainer's ranks train in
theirs, an SGLang server has one of its own. Members meet at a store where the trainer listens.

Invariants:
- The store's keys are those under which an SGLang server looks: `prefixes`.
- Nothing waits for longer than `JOIN_S` to meet, or `SEND_S` for a tensor.
- A group that failed is closed and never used again; its other members then fail as well.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from rlcore.net import own_address

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

Backend = Literal["gloo", "nccl"]
JOIN_S = 60.0
SEND_S = 120.0
POLL_S = 0.0005
DEVICES: dict[str, str] = {"gloo": "cpu", "nccl": "cuda"}
"""Where the tensors of a backend lie."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as what a member joins; the names are those of SGLang's request."""

    master_address: str
    master_port: int
    world_size: int
    group_name: str
    backend: Backend


class WeightGroup:
    """One member's hold on a group; made by `open_group` and `join_group`."""

    def __init__(self, store: Store, meeting: Meeting, rank: int) -> None:
        """Meet the others: waits for all of them with gloo, for none with NCCL."""
        import torch.distributed as dist

        self.device = DEVICES[meeting.backend]
        # Both are kept: the store is where NCCL's members meet at the first tensor.
        self._store = store
        for prefix in prefixes(meeting.group_name, self.device):
            store = dist.PrefixStore(prefix, store)
        make = _gloo if meeting.backend == "gloo" else _nccl
        self._group: Any = make(store, rank, meeting)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors, or fill them with what is sent; returns when that is done.

        Raises:
            RuntimeError: a member is gone or took too long; the group is of no use any more.
        """
        import torch
        import torch.distributed as dist

        group, options = self._group, dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        works: Any = []
        try:
            # Not every backend knows numbers of 8 bits; their bytes are what travels.
            whole = [t.view(torch.uint8) if t.itemsize == 1 else t for t in tensors]
            works += [group.broadcast([tensor], options) for tensor in whole]
            until = time.monotonic() + SEND_S
            # NCCL's own limit would end the process.
            while self.device == "cuda" and works and not works[-1].is_completed():
                if time.monotonic() > until:
                    raise RuntimeError(f"a member did not take the tensors within {SEND_S:g} s")
                time.sleep(POLL_S)
            while works:
                works.pop(0).wait()
            if self.device == "cuda":
                # Only the stream has waited until now; what failed shows here.
                torch.cuda.current_stream().synchronize()
        finally:
            # An error's traceback would keep the group, whose end is what tells the others.
            group = works = None

    def close(self) -> None:
        """Leave; whoever waits for this member is told."""
        group, self._group = self._group, None
        if group is not None and self.device == "cuda":
            group.abort()


def open_group(address: str, world_size: int, name: str, backend: Backend) -> Opening:
    """Listen for the members of a new group, as its rank 0."""
    listener = socket.create_server((address, 0))
    meeting = Meeting(address, listener.getsockname()[1], world_size, name, backend)
    return Opening(meeting, listener)


@dataclass(frozen=True, slots=True)
class Opening:
    """A group that waits for its members."""

    meeting: Meeting
    listener: socket.socket

    def join(self) -> WeightGroup:
        """Be rank 0. Blocks until all are there.

        Raises:
            RuntimeError: they were not within `JOIN_S` seconds.
        """
        # A store of its own making would listen on every address of the machine.
        store = _store(self.meeting, listening=self.listener.detach())
        return WeightGroup(store, self.meeting, 0)


def join_group(meeting: Meeting, rank: int) -> WeightGroup:
    """Be another member. Blocks until all are there.

    Raises:
        RuntimeError: they were not within `JOIN_S` seconds.
    """
    return WeightGroup(_store(meeting), meeting, rank)


def prefixes(name: str, device: str) -> tuple[str, str, str]:
    """What stands before the keys, from the store on: the caller's name, torch's, the device's."""
    return name, f"{name}/", f"{device}/"


def _store(meeting: Meeting, listening: int | None = None) -> Store:
    import torch.distributed as dist

    return dist.TCPStore(
        meeting.master_address,
        meeting.master_port,
        meeting.world_size,
        is_master=listening is not None,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _gloo(store: Store, rank: int, meeting: Meeting) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The way that leads to rank 0, and on one machine loopback: a host's name may mean another.
    device = ProcessGroupGloo.create_device(hostname=own_address(meeting.master_address))
    options._devices, options._threads = [device], 2
    options._timeout = timedelta(seconds=JOIN_S)
    group: Any = ProcessGroupGloo(store, rank, meeting.world_size, options)
    group._set_default_timeout(timedelta(seconds=SEND_S))
    return group


def _nccl(store: Store, rank: int, meeting: Meeting) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=3 * SEND_S)
    return ProcessGroupNCCL(store, rank, meeting.world_size, options)
