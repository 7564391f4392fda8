"""The lease: one holder at a time, and the others know it."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import Fenced, StoreError
from rlcore.store.lease import CLOCK_SKEW_S, Lease, is_held, read_lease, this_process
from rlcore.store.manifest import canonical_json
from rlcore.store.objects import Objects
from rlcore.store.paths import committed_key, lease_key, manifest_key, outcome_key

ROOT = Path(__file__).parents[3]


def test_each_holding_has_the_next_epoch(objects: Objects) -> None:
    first = Lease.acquire(objects, "r", "a:1:1")
    assert first.epoch == 1 and is_held(read_lease(objects, "r"))
    first.check()
    first.release()
    assert not is_held(read_lease(objects, "r"))
    assert Lease.acquire(objects, "r", "b:1:1").epoch == 2


def test_a_live_holder_is_not_displaced(objects: Objects) -> None:
    Lease.acquire(objects, "r", "elsewhere:7:7", ttl_s=60)
    with pytest.raises(Fenced, match=r"elsewhere:7:7 \(epoch 1\) until \d{4}-"):
        Lease.acquire(objects, "r", "b:1:1")


def test_a_stolen_lease_fences_its_holder(objects: Objects) -> None:
    old = Lease.acquire(objects, "r", "a:1:1")
    new = Lease.acquire(objects, "r", "b:1:1", steal=True)
    assert new.epoch == old.epoch + 1
    for act in (old.check, old.renew):
        with pytest.raises(Fenced, match=r"held by b:1:1 \(epoch 2\)"):
            act()
    old.release()
    new.check()


def test_an_expired_lease_is_free(objects: Objects) -> None:
    old = Lease.acquire(objects, "r", "a:1:1", ttl_s=0.2)
    old.check()
    time.sleep(0.3)
    new = Lease.acquire(objects, "r", "b:1:1", ttl_s=60)
    with pytest.raises(Fenced):
        old.check()
    new.check()


def test_renewal_keeps_it_and_notices_a_takeover(disk: Objects) -> None:
    lease = Lease.acquire(disk, "r", "a:1:1", ttl_s=0.8)
    lease.start()
    time.sleep(1.3)
    with pytest.raises(Fenced):
        Lease.acquire(disk, "r", "b:1:1")
    Lease.acquire(disk, "r", "b:1:1", steal=True).release()
    time.sleep(0.5)
    disk.delete(lease_key("r"))
    with pytest.raises(Fenced, match="b:1:1"):
        lease.check()
    lease.stop()


def test_one_of_many_takes_it(objects: Objects) -> None:
    def take(number: int) -> bool:
        try:
            Lease.acquire(objects, "r", f"holder{number}:1:1")
            return True
        except Fenced:
            return False

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(take, range(6))).count(True) == 1


def test_a_killed_holder_of_this_machine_is_followed_at_once(shared: Objects) -> None:
    code = (
        "import pickle, sys, time\n"
        "from rlcore.store.lease import Lease\n"
        "print(Lease.acquire(pickle.loads(bytes.fromhex(sys.argv[1])), 'r').holder, flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, pickle.dumps(shared).hex()],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.stdout
    holder = child.stdout.readline().strip()
    assert f":{child.pid}:" in holder
    with pytest.raises(Fenced, match=str(child.pid)):
        Lease.acquire(shared, "r")
    child.send_signal(signal.SIGKILL)
    # Not reaped yet: a zombie counts as gone.
    time.sleep(0.2)
    assert Lease.acquire(shared, "r").epoch == 2
    child.communicate()


def test_a_new_process_with_an_old_number_is_not_the_holder(disk: Objects) -> None:
    machine, pid, start = this_process().split(":")
    Lease.acquire(disk, "r", f"{machine}:{pid}:{int(start) + 1}")
    assert Lease.acquire(disk, "r").epoch == 2


def test_a_lease_of_another_version_is_refused(disk: Objects) -> None:
    disk.put(lease_key("r"), b'{"schema_version": 9, "epoch": 3}')
    with pytest.raises(StoreError, match="schema version 9, expected 1"):
        Lease.acquire(disk, "r")


def write_records(objects: Objects, epoch_of: dict[str, int]) -> None:
    for key, epoch in epoch_of.items():
        objects.put(key, canonical_json({"schema_version": 1, "epoch": epoch}))


@pytest.mark.parametrize("torn", [None, b"", b'{"epoch":1,"hol', b'{"schema_version":1}'])
def test_a_lost_lease_is_made_anew_above_all_records(
    shared: Objects, torn: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    committed = {committed_key("r", i): 3 for i in range(3)}
    write_records(shared, committed | {manifest_key("r", 3, "reward"): 7, outcome_key("r"): 5})
    if torn is not None:
        shared.put(lease_key("r"), torn)
    lease = Lease.acquire(shared, "r", "a:1:1")
    assert lease.epoch == 8
    lease.check()
    lease.renew()
    aside = [key for key in shared.list("runs/r") if "lease.bad-" in key]
    assert [shared.get(key) for key in aside] == ([] if torn is None else [torn])
    assert "the new one has epoch 8" in caplog.text
    assert ("is kept as" in caplog.text) == (torn is not None)


def test_of_many_that_repair_a_lease_one_takes_it(shared: Objects) -> None:
    shared.put(lease_key("r"), b"torn")

    def take(number: int) -> bool:
        try:
            Lease.acquire(shared, "r", f"holder{number}:1:1")
            return True
        except Fenced:
            return False

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(take, range(6))).count(True) == 1


def put_lease(objects: Objects, expires: float, ttl_s: float, epoch: int = 4) -> None:
    record = {"schema_version": 1, "epoch": epoch, "holder": "elsewhere:7:7"}
    record |= {"expires": expires, "ttl_s": ttl_s}
    objects.put(lease_key("r"), canonical_json(record))


def test_a_lease_that_another_repairs_meanwhile_is_left_to_it(
    disk: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.put(lease_key("r"), b"torn")
    read, repairs = disk.read_with_tag, iter([True])

    def read_while_another_repairs(key: str) -> tuple[bytes, str]:
        found = read(key)
        if next(repairs, False):
            put_lease(disk, time.time() + 60, ttl_s=60.0)
        return found

    monkeypatch.setattr(disk, "read_with_tag", read_while_another_repairs)
    with pytest.raises(Fenced, match="elsewhere:7:7"):
        Lease.acquire(disk, "r", "b:1:1")


@pytest.mark.parametrize("skew_s", [-400.0, 5000.0])
def test_a_live_holder_whose_clock_is_wrong_is_not_displaced(disk: Objects, skew_s: float) -> None:
    put_lease(disk, time.time() + skew_s, ttl_s=1.0)
    renewal = threading.Timer(0.4, put_lease, (disk, time.time() + skew_s + 0.4, 1.0))
    renewal.start()
    with pytest.raises(Fenced, match="elsewhere:7:7"):
        Lease.acquire(disk, "r", "b:1:1")
    renewal.join()


@pytest.mark.parametrize("skew_s", [-400.0, 5000.0])
def test_a_dead_holder_whose_clock_was_wrong_is_followed_after_its_term(
    disk: Objects, skew_s: float
) -> None:
    put_lease(disk, time.time() + skew_s, ttl_s=1.0)
    began = time.monotonic()
    assert Lease.acquire(disk, "r", "b:1:1").epoch == 5
    assert 1.0 <= time.monotonic() - began < 3


def test_a_lease_that_expired_long_ago_is_taken_at_once(disk: Objects) -> None:
    put_lease(disk, time.time() - CLOCK_SKEW_S - 1, ttl_s=60)
    began = time.monotonic()
    assert Lease.acquire(disk, "r", "b:1:1").epoch == 5
    assert time.monotonic() - began < 1


def test_watching_can_be_cancelled(disk: Objects) -> None:
    put_lease(disk, time.time() - 1, ttl_s=60)

    async def watch() -> None:
        async with asyncio.timeout(0.5):
            await Lease.acquired(disk, "r")

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(watch())
    assert time.monotonic() - began < 3


def test_a_stale_read_fences_nobody(disk: Objects, monkeypatch: Any) -> None:
    Lease.acquire(disk, "r", "a:1:1").release()
    old = disk.read_with_tag(lease_key("r"))
    monkeypatch.setattr(type(disk), "reads_may_be_stale", True)
    lease = Lease.acquire(disk, "r", "b:1:1")
    stale = iter([old] * 3)
    monkeypatch.setattr(
        disk,
        "read_with_tag",
        lambda key: next(stale, None) or type(disk).read_with_tag(disk, key),
    )
    lease.check()
    assert next(stale, None) is None


def test_a_stale_read_of_its_own_lease_does_not_hide_a_takeover(
    disk: Objects, monkeypatch: Any
) -> None:
    monkeypatch.setattr(type(disk), "reads_may_be_stale", True)
    lease = Lease.acquire(disk, "r", "a:1:1")
    own = disk.read_with_tag(lease_key("r"))
    Lease.acquire(Objects.open(disk.root), "r", "b:1:1", steal=True)
    stale = iter([own] * 3)
    monkeypatch.setattr(
        disk,
        "read_with_tag",
        lambda key: next(stale, None) or type(disk).read_with_tag(disk, key),
    )
    with pytest.raises(Fenced, match="b:1:1"):
        lease.check()


def test_an_outage_does_not_end_renewal(disk: Objects, monkeypatch: Any, caplog: Any) -> None:
    lease = Lease.acquire(disk, "r", "a:1:1", ttl_s=0.4)
    failures = iter([True, True])

    def fail_twice(key: str) -> tuple[bytes, str]:
        if next(failures, False):
            raise StoreError("the store is away")
        return type(disk).read_with_tag(disk, key)

    monkeypatch.setattr(disk, "read_with_tag", fail_twice)
    before = read_lease(Objects.open(disk.root), "r")
    lease.start()
    time.sleep(0.6)
    lease.stop()
    after = read_lease(Objects.open(disk.root), "r")
    assert before and after and after["expires"] > before["expires"]
    assert "not renewed" in caplog.text
