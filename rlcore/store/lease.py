"""Who may commit to a run: one driver at a time, told apart by a number that only grows.

Invariants:
- `lease.json` holds {epoch, holder, expires}; every change is a compare-and-swap.
- Taking the lease raises the epoch by one, so the epoch names one holding and never comes back.
- A holder whose epoch is no longer the stored one is fenced: `check` raises, before each commit
  and in each call of an actor, and nothing it still writes is committed.
- A lease is free when it was released, when its holder was a process of this machine that is gone
  (so that a killed driver is followed at once), or when it has expired. The expiry was written by
  the holder's clock: one of another machine is believed once it is `CLOCK_SKEW_S` old, or once the
  record has stayed the same for its whole term on our own clock.
- A record that is absent or torn is made anew, above every epoch that the run's records name.
- Reads may be stale, conditional writes are not: where the store is remote, `check` is a write, and
  a record older than our own holding is read again.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcore.errors import Corrupt, Fenced, NotFound, StoreError
from rlcore.store.manifest import SCHEMA_VERSION, canonical_json, parse_record
from rlcore.store.objects import Objects
from rlcore.store.paths import bad_lease_key, lease_key

log = logging.getLogger("sluice.store")

RENEWALS_PER_TTL = 4
CLOCK_SKEW_S = 600.0
"""How far apart the clocks of two machines may be."""
STOP_PATIENCE_S = 10.0
"""Seconds that a renewal in progress is waited for at the end."""
STALE_PATIENCE_S = 10.0
"""How long a store may show what lay there before our own last write."""
_STALE_PAUSE_S = 0.05


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

        May watch the record of a holder on another machine for the length of its term.

        Args:
            objects: the store.
            run_id: the run.
            holder: who takes it; None: this process.
            ttl_s: seconds without a renewal after which others may take it.
            steal: take it even from a live holder, who is then fenced.

        Raises:
            Fenced: another holder is alive.
        """
        claim = _Claim(objects, run_id, holder or this_process(), ttl_s, steal)
        while (lease := claim.attempt()) is None:
            time.sleep(claim.pause_s)
        return lease

    @classmethod
    async def acquired(cls, objects: Objects, run_id: str, ttl_s: float = 120.0) -> "Lease":
        """`acquire` for this process, which can be cancelled while it watches."""
        claim = _Claim(objects, run_id, this_process(), ttl_s, steal=False)
        while (lease := await asyncio.to_thread(claim.attempt)) is None:
            await asyncio.sleep(claim.pause_s)
        return lease

    def check(self) -> None:
        """Make sure that this holding is still the run's.

        Raises:
            Fenced: naming who holds the run now.
        """
        if self._lost:
            raise Fenced(self._lost)
        if self._objects.reads_may_be_stale:
            # Only the server's own decision shows who holds the run now.
            self.renew()
        else:
            self._own_record()

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
        """End the background thread; the lease stays held until it expires.

        A renewal that waits for a store that is away is not waited for.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_PATIENCE_S)
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
            until = time.monotonic() + STALE_PATIENCE_S
            while True:
                tag = self._own_record()
                record = _record(self.epoch, self.holder, expires, self.ttl_s)
                if self._objects.compare_and_swap(self._key, record, tag):
                    return
                if time.monotonic() > until:
                    raise StoreError(
                        f"{self._objects.url(self._key)} cannot be replaced, though it reads as "
                        "this driver's own; the store returns stale reads: check what lies "
                        "between it and this machine, such as a cache"
                    )
                time.sleep(_STALE_PAUSE_S)

    def _own_record(self) -> str | None:
        """The tag of the stored record, which is this holding's.

        A record from before this holding is a stale read: it is read again for a while.
        """
        until = time.monotonic() + (STALE_PATIENCE_S if self._objects.reads_may_be_stale else 0.0)
        while True:
            record, tag = _read(self._objects, self._key)
            older = record is None or record["epoch"] < self.epoch
            if not older or time.monotonic() >= until:
                self._compare(record)
                return tag
            time.sleep(_STALE_PAUSE_S)

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


@dataclass
class _Claim:
    """One process's attempts at a run: what it has seen of the record, and since when."""

    objects: Objects
    run_id: str
    holder: str
    ttl_s: float
    steal: bool
    pause_s: float = _STALE_PAUSE_S
    _seen: str | None = None
    _since: float = 0.0

    def attempt(self) -> Lease | None:
        """The lease; None: try again after `pause_s`.

        Raises:
            Fenced: another holder is alive.
        """
        key = lease_key(self.run_id)
        try:
            record, tag = _read(self.objects, key)
        except Corrupt as error:
            record, tag = None, self._put_aside(error)
            if tag is None:
                return None
        if record and not self.steal and not _is_free(record, self.holder):
            self._watch(record, tag)
            if time.monotonic() < self._since + _term(record):
                return None
            log.warning(
                "run %s: the lease of %s has not changed for %.0f s; taking it over",
                self.run_id,
                record["holder"],
                _term(record),
            )
        epoch = 1 + (record["epoch"] if record else highest_epoch(self.objects, self.run_id))
        new = _record(epoch, self.holder, time.time() + self.ttl_s, self.ttl_s)
        if not self.objects.compare_and_swap(key, new, tag):
            return None
        if record is None and epoch > 1:
            log.warning(
                "run %s had no readable lease; the new one has epoch %d", self.run_id, epoch
            )
        return Lease(self.objects, self.run_id, self.holder, epoch, self.ttl_s)

    def _watch(self, record: dict[str, Any], tag: str | None) -> None:
        """Go on watching a record that may have expired; raise if its holder is alive."""
        if self._seen is None:
            if not is_doubtful(record):
                raise Fenced(held_by(self.run_id, record))
            self._seen, self._since = tag, time.monotonic()
            self.pause_s = min(1.0, _term(record) / 20)
            log.warning(
                "run %s: the lease of %s has expired by this machine's clock; watching for up to "
                "%.0f s whether it is renewed",
                self.run_id,
                record["holder"],
                _term(record),
            )
        elif self._seen != tag:
            raise Fenced(held_by(self.run_id, record))

    def _put_aside(self, error: Corrupt) -> str | None:
        """Keep a copy of a torn record for whoever wonders; the tag to replace it by. None: another
        has repaired it meanwhile.
        """
        key = lease_key(self.run_id)
        try:
            data, tag = self.objects.read_with_tag(key)
        except NotFound:
            return None
        with contextlib.suppress(Corrupt):
            _parse(data, self.objects.url(key))
            return None
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        aside = bad_lease_key(self.run_id, stamp)
        self.objects.put(aside, data)
        log.error("%s; it is kept as %s and a new one is made", error, self.objects.url(aside))
        return tag


def highest_epoch(objects: Objects, run_id: str) -> int:
    """The highest epoch that the run's records name, its lease apart; 0 if there is none.

    Looks at the outcome, the last committed iteration, and the manifests of it and the next one.
    """
    from rlcore.store.paths import STAGES, committed_key, manifest_key, outcome_key
    from rlcore.store.run_store import RunStore

    last = RunStore(objects, run_id).last_committed()
    keys = [outcome_key(run_id)]
    if last is not None:
        keys.append(committed_key(run_id, last))
    for iteration in range(last or 0, (-1 if last is None else last) + 2):
        keys += [manifest_key(run_id, iteration, stage) for stage in STAGES]
    epochs = [0]
    for key in keys:
        try:
            epoch = parse_record(objects.get(key), objects.url(key)).get("epoch")
        except (NotFound, Corrupt):
            continue
        epochs += [epoch] if isinstance(epoch, int) else []
    return max(epochs)


def this_process() -> str:
    """The name of this process."""
    return process_name(os.getpid())


def process_name(pid: int) -> str:
    """`host:pid:start`, one name for one process of this machine: `start` is its start time in
    clock ticks after boot.

    `host` carries a digest of the boot and the process namespace, since containers may share a
    host name.
    """
    return f"{_machine()}:{pid}:{_start_ticks(pid) or 0}"


def read_lease(objects: Objects, run_id: str) -> dict[str, Any] | None:
    """The run's lease {epoch, holder, expires (Unix seconds)}, for display.

    None if it never had one.
    """
    return _read(objects, lease_key(run_id))[0]


def is_held(record: dict[str, Any] | None) -> bool:
    """Whether a lease that was read is held by a driver that seems alive."""
    if record is None or _is_free(record, holder=""):
        return False
    return bool(record["expires"] > time.time())


def may_be_held(record: dict[str, Any] | None) -> bool:
    """Whether a driver may still be alive, as far apart as clocks can be."""
    return record is not None and not _is_free(record, holder="")


def held_by(run_id: str, record: dict[str, Any]) -> str:
    """Who holds a run, and what to do, in a sentence."""
    return (
        f"run {run_id} is held by {record['holder']} (epoch {record['epoch']}) until "
        f"{_clock(record['expires'])}, which it puts off for as long as it lives; stop that driver "
        "first"
    )


def _is_free(record: dict[str, Any], holder: str) -> bool:
    """Whether nobody can hold it any more, by what this machine knows."""
    if record["holder"] == holder or not record["expires"] or is_dead(record["holder"]):
        return True
    return bool(record["expires"] + (0.0 if _is_ours(record) else CLOCK_SKEW_S) <= time.time())


def is_doubtful(record: dict[str, Any]) -> bool:
    """Whether only watching it can tell: another machine's lease that has expired, or that ends
    later than a term from now, so that the clocks differ.
    """
    left = record["expires"] - time.time()
    return not _is_ours(record) and not 0 < left <= _term(record) + 1.0


def _is_ours(record: dict[str, Any]) -> bool:
    """Whether this machine's clock wrote it."""
    return bool(record["holder"].split(":")[0] == _machine())


def _term(record: dict[str, Any]) -> float:
    return float(record.get("ttl_s", 120.0))


def is_dead(holder: str) -> bool:
    """Whether a holder was a process of this very machine and has ended."""
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


def _record(epoch: int, holder: str, expires: float, ttl_s: float) -> bytes:
    return canonical_json(
        {
            "schema_version": SCHEMA_VERSION,
            "epoch": epoch,
            "holder": holder,
            "expires": round(expires, 3),
            "ttl_s": ttl_s,
        }
    )


def _read(objects: Objects, key: str) -> tuple[dict[str, Any] | None, str | None]:
    try:
        data, tag = objects.read_with_tag(key)
    except NotFound:
        return None, None
    return _parse(data, objects.url(key)), tag


def _parse(data: bytes, where: str) -> dict[str, Any]:
    record = parse_record(data, where)
    kinds = {"epoch": int, "holder": str, "expires": int | float}
    if wrong := [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]:
        raise Corrupt(f"{where} is no lease: it lacks {sorted(wrong)}")
    return record


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
