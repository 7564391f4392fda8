"""Who may commit to a run: one driver at a time, told apart by a number that only grows.

Invariants:
- `lease.json` holds {epoch, holder, expires}; every change is a compare-and-swap.
- Taking the lease raises the epoch by one, so the epoch names one holding and never comes back.
- A holder whose epoch is no longer the stored one is fenced: `check` raises, before each commit
  and in each call of an actor, and nothing it still writes is committed.
- A lease is free when it was released, has expired, or its holder was a process of this machine
  that is gone, so that a killed driver can be followed at once.
"""

import hashlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from rlcore.errors import Corrupt, Fenced, NotFound, StoreError
from rlcore.store.manifest import SCHEMA_VERSION, canonical_json, parse_record
from rlcore.store.objects import Objects
from rlcore.store.paths import lease_key

log = logging.getLogger("sluice.store")

RENEWALS_PER_TTL = 4


class Lease:
    """A held lease. Make one with `acquire`."""

    def __init__(
        self, objects: Objects, run_id: str, holder: str, epoch: int, ttl_s: float
    ) -> None:
        self.run_id = run_id
        self.holder = holder
        self.epoch = epoch
        self.ttl_s = ttl_s
        self._objects = objects
        self._key = lease_key(run_id)
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._swap_lock = threading.Lock()

    @classmethod
    def acquire(
        cls,
        objects: Objects,
        run_id: str,
        holder: str | None = None,
        ttl_s: float = 120.0,
        *,
        steal: bool = False,
    ) -> "Lease":
        """Take the run, with the next epoch.

        Args:
            objects: the store.
            run_id: the run.
            holder: who takes it; None: this process.
            ttl_s: seconds without a renewal after which others may take it.
            steal: take it even from a live holder, who is then fenced.

        Raises:
            Fenced: another holder is alive.
        """
        holder = holder or this_process()
        key = lease_key(run_id)
        while True:
            record, tag = _read(objects, key)
            if record and not steal and not _is_free(record, holder):
                raise Fenced(held_by(run_id, record))
            epoch = record["epoch"] + 1 if record else 1
            if objects.compare_and_swap(key, _record(epoch, holder, time.time() + ttl_s), tag):
                return cls(objects, run_id, holder, epoch, ttl_s)

    def check(self) -> None:
        """Make sure that this holding is still the run's.

        Raises:
            Fenced: naming who holds the run now.
        """
        if self._lost:
            raise Fenced(self._lost)
        record, _ = _read(self._objects, self._key)
        self._compare(record)

    def renew(self) -> None:
        """Put the expiry off by another `ttl_s`.

        Raises:
            Fenced: the run was taken over.
        """
        self._swap(time.time() + self.ttl_s)

    def release(self) -> None:
        """Give the run up, so that the next driver need not wait.

        Being fenced already is no error.
        """
        self.stop()
        try:
            self._swap(0.0)
        except Fenced:
            log.info("run %s was taken over before its release", self.run_id)

    def start(self) -> None:
        """Renew from a background thread, four times in `ttl_s`."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(
                target=self._renew_forever, name=f"lease-{self.run_id}", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the background thread; the lease stays held until it expires."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _renew_forever(self) -> None:
        while not self._stop.wait(self.ttl_s / RENEWALS_PER_TTL):
            try:
                self.renew()
            except Fenced as error:
                self._lost = str(error)
                log.error("%s", error)
                return
            except StoreError as error:
                # The store may come back before the lease expires; the next commit checks in any
                # case.
                log.warning("lease of run %s not renewed: %s", self.run_id, error)

    def _swap(self, expires: float) -> None:
        with self._swap_lock:
            while True:
                record, tag = _read(self._objects, self._key)
                self._compare(record)
                if self._objects.compare_and_swap(
                    self._key, _record(self.epoch, self.holder, expires), tag
                ):
                    return

    def _compare(self, record: dict[str, Any] | None) -> None:
        if record is None:
            raise Fenced(
                f"run {self.run_id} has no lease any more ({self._objects.url(self._key)} is gone)"
            )
        if (record["epoch"], record["holder"]) != (self.epoch, self.holder):
            raise Fenced(
                f"run {self.run_id} is held by {record['holder']} (epoch {record['epoch']}) and no "
                f"longer by {self.holder} (epoch {self.epoch}); this driver must end"
            )


def this_process() -> str:
    """`host:pid:start`, one name for one process: `start` is its start time in clock ticks after
    boot.

    `host` carries a digest of the boot and the process namespace, since containers may share a
    host name.
    """
    return f"{_machine()}:{os.getpid()}:{_start_ticks(os.getpid()) or 0}"


def read_lease(objects: Objects, run_id: str) -> dict[str, Any] | None:
    """The run's lease {epoch, holder, expires (Unix seconds)}, for display.

    None if it never had one.
    """
    return _read(objects, lease_key(run_id))[0]


def is_held(record: dict[str, Any] | None) -> bool:
    """Whether a lease that was read is held by a driver that may be alive."""
    return record is not None and not _is_free(record, holder="")


def held_by(run_id: str, record: dict[str, Any]) -> str:
    """Who holds a run, and what to do, in a sentence."""
    return (
        f"run {run_id} is held by {record['holder']} (epoch {record['epoch']}) until "
        f"{_clock(record['expires'])}, which it puts off for as long as it lives; stop that driver "
        "first"
    )


def _is_free(record: dict[str, Any], holder: str) -> bool:
    return bool(
        record["holder"] == holder or record["expires"] <= time.time() or _is_dead(record["holder"])
    )


def _is_dead(holder: str) -> bool:
    """Whether the holder was a process of this very machine and has ended."""
    machine, pid, start = [*holder.split(":"), "", "", ""][:3]
    readable = _start_ticks(os.getpid()) is not None
    if not readable or machine != _machine() or not (pid.isdigit() and start.isdigit()):
        return False
    return _start_ticks(int(pid)) != int(start)


def _start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks after boot; None if it ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name may hold spaces and brackets; the fields begin after its last one.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname().replace(":", "-")
    tag = hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:8]
    return f"{socket.gethostname().replace(':', '-')}-{tag}"


def _record(epoch: int, holder: str, expires: float) -> bytes:
    return canonical_json(
        {
            "schema_version": SCHEMA_VERSION,
            "epoch": epoch,
            "holder": holder,
            "expires": round(expires, 3),
        }
    )


def _read(objects: Objects, key: str) -> tuple[dict[str, Any] | None, str | None]:
    try:
        data, tag = objects.read_with_tag(key)
    except NotFound:
        return None, None
    record = parse_record(data, objects.url(key))
    if missing := {"epoch", "holder", "expires"} - record.keys():
        raise Corrupt(f"{objects.url(key)} is no lease: it lacks {sorted(missing)}")
    return record, tag


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
