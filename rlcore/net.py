"""Small facts about this machine's network, and how NCCL is to use it."""

import contextlib
import os
import socket
import time

import psutil

PAUSE_S = 0.2
TRIES = 50


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """A TCP port that nothing listens on at this moment.

    Args:
        host: the address to listen on.
        port: the port wanted; 0: any.

    Raises:
        OSError: the port wanted is taken.
    """
    with socket.socket() as probe:
        if port:
            # As a server would: connections of the one before that are still closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def own_address(towards: str) -> str:
    """The address under which this machine is seen by another one, given by its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only looks up the way.
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an address, by its name; None where none has."""
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` TCP ports in a row that nothing listens on at this moment.

    Raises:
        OSError: none was found in `TRIES` tries.
    """
    for _ in range(TRIES):
        first = free_port(host)
        with contextlib.suppress(OSError, OverflowError):
            for port in range(first + 1, first + count):
                free_port(host, port)
            return first
    raise OSError(f"{host} has no {count} free ports in a row")


def listens(host: str, port: int, patience_s: float) -> bool:
    """Whether something accepts connections at an address, or comes to within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while (left := deadline - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), timeout=max(left, PAUSE_S)),
        ):
            return True
        time.sleep(PAUSE_S)
    return False


def share_as_sglang() -> None:
    """Have NCCL share memory between processes of a node in the way that SGLang's servers do: what
    one way shares the other cannot open. To be called before the first group of this process.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
