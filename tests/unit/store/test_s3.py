"""S3 alone: lost answers, outages, and errors in sentences."""

import logging
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, Request, Rule, fault_proxy, mixed

from rlcore.errors import Conflict, Fenced, StoreError
from rlcore.store.lease import Lease
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import lease_key
from rlcore.store.run_store import RunStore


def losing(*numbers: int) -> Rule:
    """A rule that loses the answers to the requests of these numbers."""
    return lambda request: Fault.LOSE if request.number in numbers else Fault.NONE


def open_at(server: Any, endpoint: str, retry_s: float = 20) -> Objects:
    options = server.options | {"endpoint_url": endpoint}
    return Objects.open(f"s3://runs/{uuid.uuid4().hex}", options, retry_s=retry_s)


def test_a_put_whose_answer_was_lost_counts_as_ours(s3: Any) -> None:
    with fault_proxy(s3.endpoint) as proxy:
        proxy.rule = losing(1)
        objects = open_at(s3, proxy.endpoint)
        assert objects.put_if_absent("k", b"mine")
        assert not objects.put_if_absent("k", b"mine")
        assert objects.get("k") == b"mine"


def test_a_swap_whose_answer_was_lost_counts_as_ours(s3: Any) -> None:
    with fault_proxy(s3.endpoint) as proxy:
        proxy.rule = losing(3)
        objects = open_at(s3, proxy.endpoint)
        objects.put("k", b"1")
        tag = objects.read_with_tag("k")[1]
        assert objects.compare_and_swap("k", b"2", tag)
        assert not objects.compare_and_swap("k", b"3", tag)
        assert objects.get("k") == b"2"


def test_an_outage_is_waited_out(moto: Any, caplog: pytest.LogCaptureFixture) -> None:
    with fault_proxy(moto.endpoint) as proxy:
        proxy.unavailable_for(4)
        objects = open_at(moto, proxy.endpoint)
        with caplog.at_level(logging.WARNING, "sluice.store"):
            objects.put("k", b"v")
            assert objects.get("k") == b"v"
    assert "trying again" in caplog.text and objects.root in caplog.text


def test_an_outage_without_end_is_a_sentence(moto: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    objects = open_at(moto, endpoint, retry_s=1.5)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://runs/.*/k: the store did not answer for 2 s"):
        objects.get("k")
    assert time.monotonic() - began < 10


def test_a_missing_bucket_is_named(s3: Any) -> None:
    objects = Objects.open("s3://nowhere/x", s3.options, retry_s=5)
    with pytest.raises(StoreError, match="nowhere"):
        objects.put_if_absent("k", b"")
    with pytest.raises(StoreError, match="names no bucket"):
        Objects.open("s3://")


def test_wrong_credentials_are_named(seaweed: Any) -> None:
    objects = Objects.open("s3://runs/x", seaweed.options | {"key": "who"}, retry_s=5)
    with pytest.raises(StoreError, match="access denied"):
        objects.put("k", b"")


def test_the_environment_can_name_the_server(moto: Any) -> None:
    options = moto.options
    code = (
        "from rlcore.store.objects import Objects\n"
        "assert Objects.open('s3://runs/env', retry_s=5).put_if_absent('k', b'from env')"
    )
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "FSSPEC_S3_ENDPOINT_URL": options["endpoint_url"],
        "FSSPEC_S3_KEY": options["key"],
        "FSSPEC_S3_SECRET": options["secret"],
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | environment)
    assert Objects.open("s3://runs/env", options).get("k") == b"from env"


def test_a_large_object_comes_in_parts_and_whole(s3: Any, tmp_path: Any) -> None:
    objects = open_at(s3, s3.endpoint)
    block = bytes(range(256)) * 4096
    with objects.writer("big") as file:
        for _ in range(60):
            file.write(block)
    assert objects.size("big") == 60 << 20
    objects.download("big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == block * 60


def test_a_request_that_is_never_answered_ends(moto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.store.s3.READ_S", 1)
    with fault_proxy(moto.endpoint) as proxy:
        proxy.rule = lambda request: Fault.HANG if request.number <= 2 else Fault.NONE
        objects = open_at(moto, proxy.endpoint)
        began = time.monotonic()
        assert objects.put_if_absent("k", b"v")
        assert 2 <= time.monotonic() - began < 10
        proxy.rule = lambda request: Fault.HANG
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"did not answer for 2 s .*imeout"):
            open_at(moto, proxy.endpoint, retry_s=2).get("k")
        assert time.monotonic() - began < 10


def test_a_body_that_breaks_off_is_read_again(s3: Any, tmp_path: Path) -> None:
    content = os.urandom(30 << 20)
    (tmp_path / "big").write_bytes(content)
    open_at(s3, s3.endpoint)
    with fault_proxy(s3.endpoint) as proxy:
        objects = open_at(s3, proxy.endpoint)
        proxy.rule = lambda request: Fault.CUT if request.number % 3 == 1 else Fault.NONE
        objects.upload(tmp_path / "big", "big")
        objects.download("big", tmp_path / "back")
        assert objects.get("big") == content
        with objects.open_read("big") as file:
            file.seek(17_000_000)
            assert file.read(5_000_000) == content[17_000_000:22_000_000]
        assert proxy.seen[Fault.CUT] > 5
    assert (tmp_path / "back").read_bytes() == content


def test_whatever_the_network_does_writes_have_one_winner(s3: Any) -> None:
    faults = (Fault.UNAVAILABLE, Fault.CUT, Fault.LOSE)
    with fault_proxy(s3.endpoint) as proxy:
        objects = open_at(s3, proxy.endpoint, retry_s=60)
        proxy.rule = mixed(seed=5, share=0.3, kinds=faults)
        with ThreadPoolExecutor(4) as pool:
            for round in range(6):
                key = f"k{round}"
                won = list(pool.map(lambda n, k=key: objects.put_if_absent(k, b"%d" % n), range(4)))
                assert won.count(True) == 1
                assert objects.get(key) == b"%d" % won.index(True)
        assert all(proxy.seen[fault] for fault in faults)


def manifest_of(lease: Lease, attempt: str, source: str = "same") -> Manifest:
    return Manifest(
        run_id="r",
        iteration=0,
        stage="reward",
        config_digest="c",
        inputs={"rollout": source},
        epoch=lease.epoch,
        attempt=attempt,
    )


def stale_reads(what: str) -> Rule:
    """A rule that answers reads of some keys from the past."""
    return lambda request: Fault.STALE if what in request.path else Fault.NONE


def until_fresh(rule: Rule, reads: int) -> Rule:
    """The rule, for so many stale reads; then reads are fresh."""
    left = [reads]

    def limited(request: Request) -> Fault:
        fault = rule(request)
        if fault is Fault.STALE and request.is_read:
            left[0] -= 1
            return fault if left[0] >= 0 else Fault.NONE
        return fault

    return limited


def test_a_driver_that_reads_its_old_lease_commits_nothing(s3: Any) -> None:
    with fault_proxy(s3.endpoint) as proxy:
        behind = open_at(s3, proxy.endpoint)
        ahead = Objects.open(behind.root, s3.options)
        old = Lease.acquire(behind, "r", "old:1:1")
        old.check()
        proxy.freeze()
        proxy.rule = until_fresh(stale_reads("lease.json"), 20)
        new = Lease.acquire(ahead, "r", "new:1:1", steal=True)
        with pytest.raises(Fenced, match="held by new:1:1"):
            RunStore(behind, "r").commit(manifest_of(old, "old"), old)
        assert proxy.seen[Fault.STALE] == 20
        assert RunStore(ahead, "r").stage(0, "reward") is None
        new.check()


@pytest.mark.parametrize("source", ["same", "other"])
def test_a_manifest_that_reads_as_absent_is_not_committed_twice(s3: Any, source: str) -> None:
    with fault_proxy(s3.endpoint) as proxy:
        behind = open_at(s3, proxy.endpoint)
        ahead = Objects.open(behind.root, s3.options)
        first = Lease.acquire(ahead, "r", "first:1:1")
        ref = RunStore(ahead, "r").commit(manifest_of(first, "first"), first)
        first.release()
        second = Lease.acquire(behind, "r", "second:1:1")
        store = RunStore(behind, "r")
        proxy.freeze()
        proxy.rule = until_fresh(stale_reads("_MANIFEST"), 2)
        # It finds nothing done, does the work again, and learns at the commit who was first.
        assert store.lookup(0, "reward", {"rollout": source}, "c") is None
        commit: Callable[[], Any] = lambda: store.commit(  # noqa: E731
            manifest_of(second, "second", source), second
        )
        if source == "same":
            assert commit() == ref
        else:
            with pytest.raises(Conflict, match="made from another rollout"):
                commit()
        assert RunStore(ahead, "r").stage(0, "reward")[0].attempt == "first"  # type: ignore[index]


def test_an_old_lease_that_reads_as_free_is_not_taken_from_a_live_driver(s3: Any) -> None:
    with fault_proxy(s3.endpoint) as proxy:
        behind = open_at(s3, proxy.endpoint)
        ahead = Objects.open(behind.root, s3.options)
        Lease.acquire(behind, "r", "gone:1:1").release()
        behind.get(lease_key("r"))
        proxy.freeze()
        proxy.rule = until_fresh(stale_reads("lease.json"), 5)
        live = Lease.acquire(ahead, "r", "live:1:1")
        with pytest.raises(Fenced, match="held by live:1:1"):
            Lease.acquire(behind, "r", "late:1:1")
        live.check()
