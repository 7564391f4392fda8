"""What every backend of the object store promises."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlcore.errors import NotFound, StoreError
from rlcore.store.objects import Objects

ROOT = Path(__file__).parents[3]


def test_round_trip(objects: Objects, tmp_path: Path) -> None:
    objects.put("a/b.json", b"one")
    objects.put("a/b.json", b"two")
    assert objects.get("a/b.json") == b"two"
    assert objects.size("a/b.json") == 3
    assert objects.exists("a/b.json") and not objects.exists("a/c.json")
    assert objects.url("a/b.json").startswith(objects.root)
    (tmp_path / "local").write_bytes(b"x" * 100_000)
    objects.upload(tmp_path / "local", "a/up")
    objects.download("a/up", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"x" * 100_000
    with objects.open_read("a/up") as file:
        file.seek(99_990)
        assert file.read() == b"x" * 10


def test_listing_and_removal(objects: Objects) -> None:
    for key in ("r/x/1", "r/x/2", "r/y/z/3", "rr/4"):
        objects.put(key, b".")
    assert objects.list("r") == ["r/x/1", "r/x/2", "r/y/z/3"]
    assert objects.children("r") == ["x", "y"]
    objects.delete_tree("r/x")
    assert objects.list("r") == ["r/y/z/3"]
    objects.delete("r/y/z/3")
    objects.delete("r/y/z/3")
    assert objects.list("r") == [] and objects.children("nothing") == []
    objects.delete_tree("nothing")
    assert objects.get("rr/4") == b"."


def test_missing_key_is_named(objects: Objects, tmp_path: Path) -> None:
    for act in (
        lambda: objects.get("no/such"),
        lambda: objects.size("no/such"),
        lambda: objects.download("no/such", tmp_path / "x"),
        lambda: objects.open_read("no/such").read(),
    ):
        with pytest.raises(NotFound, match="no/such"):
            act()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../b", "a//b", "./a", "a\\b"])
def test_keys_stay_below_the_root(objects: Objects, key: str) -> None:
    for act in (objects.get, objects.delete, objects.exists, objects.open_read):
        with pytest.raises(StoreError, match="root"):
            act(key)
    with pytest.raises(StoreError, match="root"):
        objects.put(key, b"")
    with pytest.raises(StoreError, match="root"):
        objects.put_if_absent(key, b"")


def test_put_if_absent_never_replaces(objects: Objects) -> None:
    assert objects.put_if_absent("k", b"first")
    assert not objects.put_if_absent("k", b"second")
    assert not objects.put_if_absent("k", b"first")
    assert objects.get("k") == b"first"


def test_put_if_absent_has_one_winner_among_threads(objects: Objects) -> None:
    gate = threading.Barrier(8)

    def put(number: int) -> bool:
        gate.wait()
        return objects.put_if_absent("race", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(put, range(8)))
    assert won.count(True) == 1
    assert objects.get("race") == b"%d" % won.index(True)


def test_compare_and_swap(objects: Objects) -> None:
    assert objects.compare_and_swap("k", b"1", None)
    assert not objects.compare_and_swap("k", b"2", None)
    _, tag = objects.read_with_tag("k")
    assert objects.compare_and_swap("k", b"2", tag)
    assert not objects.compare_and_swap("k", b"3", tag)
    assert objects.get("k") == b"2"
    objects.delete("k")
    assert not objects.compare_and_swap("k", b"4", tag)
    assert not objects.exists("k")


def test_compare_and_swap_loses_no_increment(objects: Objects) -> None:
    objects.put("count", b"0")

    def add() -> None:
        for _ in range(5):
            while True:
                data, tag = objects.read_with_tag("count")
                if objects.compare_and_swap("count", b"%d" % (int(data) + 1), tag):
                    break

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(add) for _ in range(4)]:
            done.result()
    assert objects.get("count") == b"20"


def test_writer_shows_all_or_nothing(objects: Objects) -> None:
    with objects.writer("w") as file:
        file.write(b"x" * 1000)
        file.flush()
        assert not objects.exists("w")
        file.write(b"y")
    assert objects.size("w") == 1001
    with pytest.raises(RuntimeError), objects.writer("broken") as file:
        file.write(b"half")
        raise RuntimeError
    assert not objects.exists("broken") and objects.list("broken") == []


def test_a_reader_never_sees_half_a_file(objects: Objects) -> None:
    versions = [bytes([65 + i]) * 300_000 for i in range(3)]
    objects.put("v", versions[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(12):
            objects.put("v", versions[turn % 3])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or reads == 0:
        assert objects.get("v") in versions
        reads += 1
    writer.join()


def test_it_pickles(objects: Objects) -> None:
    objects.put("k", b"v")
    assert pickle.loads(pickle.dumps(objects)).get("k") == b"v"


def test_check_writable_leaves_nothing(objects: Objects) -> None:
    objects.check_writable()
    objects.put("a/b", b"")
    assert objects.list("a") == ["a/b"]


def run_child(code: str, objects: Objects, *more: str) -> "subprocess.Popen[str]":
    """A Python process with `objects` open."""
    head = (
        "import pickle, sys, time; objects = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print('ready', flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code, pickle.dumps(objects).hex(), *more],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_one_winner_among_processes(shared: Objects) -> None:
    code = "sys.stdin.readline(); print(objects.put_if_absent('race', sys.argv[2].encode()))"
    children = [run_child(code, shared, str(n)) for n in range(3)]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    answers = []
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        answers.append(child.communicate(timeout=60)[0].strip())
    assert sorted(answers) == ["False", "False", "True"]
    assert shared.get("race") == b"%d" % answers.index("True")


def test_a_killed_writer_leaves_nothing(shared: Objects) -> None:
    code = (
        "with objects.writer('d/killed') as file:\n"
        "    while True:\n"
        "        file.write(b'x' * 65536); file.flush(); time.sleep(0.001)\n"
    )
    child = run_child(code, shared)
    assert child.stdout and child.stdout.readline() == "ready\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    assert not shared.exists("d/killed")
    assert shared.list("d") == []
    with pytest.raises(NotFound):
        shared.get("d/killed")


def test_a_file_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file is not a folder"):
        Objects.open(tmp_path / "file")
    with pytest.raises(StoreError, match="known"):
        Objects.open("ftp://host/x")


def test_an_unwritable_root_is_named() -> None:
    # /proc refuses new folders, also to root, whom permission bits would not stop.
    with pytest.raises(StoreError, match="/proc/nowhere"):
        Objects.open("/proc/nowhere").check_writable()
