"""Programs of a model: what they may do, and what they are kept from."""

import asyncio
import os
import subprocess
import time

import psutil
import pytest

from rlcore.rollout.sandbox import Ran, isolated, run_python


def ran(code: str, **options: object) -> Ran:
    return asyncio.run(run_python(code, **options))  # type: ignore[arg-type]


def test_output_and_errors_are_told_in_order() -> None:
    done = ran("import sys\nprint(6 * 7)\nsys.stdout.flush()\n1 / 0")
    assert done.output.startswith("42\nTraceback") and "ZeroDivisionError" in done.output
    assert not done.ok and done.code == 1 and not done.timed_out
    assert ran("print('ok')") == Ran("ok\n", 0) and ran("print('ok')").ok


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_what_runs_on_is_ended(code: str) -> None:
    began = time.monotonic()
    done = ran(code, timeout_s=0.5)
    assert done.timed_out and not done.ok
    assert time.monotonic() - began < 10


def test_memory_files_and_output_are_bounded() -> None:
    assert "MemoryError" in ran("x = 'x' * 10**9", memory_mb=256).output
    assert not ran("open('big', 'wb').write(b'x' * 10**8)").ok
    assert len(ran("print('x' * 10**6)", max_output=100).output) == 100


def test_it_sees_neither_environment_nor_files_nor_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SECRET", "pl4nted")
    code = "import os; print(sorted(os.environ), os.listdir('.'), os.getcwd())"
    output = ran(code).output
    assert "MY_SECRET" not in output and "[]" in output
    assert "ModuleNotFoundError" in ran("import torch").output


def test_children_end_with_it() -> None:
    mark = f"7{os.getpid()}.25"
    code = (
        "import subprocess\n"
        f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
        "print('left one behind')"
    )
    assert ran(code).output == "left one behind\n"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _sleeping(mark):
        time.sleep(0.1)
    if isolated():
        assert not _sleeping(mark)
    else:
        subprocess.run(["pkill", "-f", f"sleep {mark}"], check=False)


def _sleeping(mark: str) -> bool:
    return any(p.info["cmdline"] == ["sleep", mark] for p in psutil.process_iter(["cmdline"]))


@pytest.mark.skipif(not isolated(), reason="this machine allows no namespaces")
def test_there_is_no_network() -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 22), 2)"
    assert "OSError" in ran(code).output or "Network is unreachable" in ran(code).output


def test_many_run_side_by_side() -> None:
    async def all_of_them() -> list[Ran]:
        return await asyncio.gather(*(run_python(f"print({k})", timeout_s=30) for k in range(8)))

    assert [one.output for one in asyncio.run(all_of_them())] == [f"{k}\n" for k in range(8)]
