"""An engine on two nodes: its parts meet, are watched, and are started again, all or none.

In place of SGLang's server stands one that only says what it was started with: the real one needs a
GPU on each node.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlcore.cluster import ray_session
from rlcore.cluster.engine_actor import EngineSpec
from rlcore.cluster.engines import Engines
from rlcore.cluster.placement import Place
from rlcore.errors import EngineError

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

words = sys.argv[1:]
told = {words[k][2:]: words[k + 1] for k in range(0, len(words), 2)}
if os.path.exists(told["model-path"] + "/broken-" + told["node-rank"]):
    sys.exit("no memory on this node")
told |= {"pid": os.getpid(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}
with open(told["model-path"] + "/part-" + told["node-rank"] + ".json", "w") as file:
    json.dump(told, file)


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        with open(told["model-path"] + "/asked-" + told["node-rank"], "a") as file:
            print(self.path, file=file)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


HTTPServer((told["host"], int(told["port"])), Health).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where parts say what they were started with."""
    import ray

    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
        assert ray_session.connect("local")
    yield tmp_path
    ray.shutdown()


def engines(folder: Path) -> Engines:
    spec = EngineSpec(
        "sglang", str(folder), str(folder / "logs"), tensor_parallel=4, gpus=4, start_timeout_s=60
    )
    return Engines(spec, [[Place({}, ("0", "1")), Place({}, ("6", "7"))]])


def part(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"part-{rank}.json").read_text()))


def asked(folder: Path, rank: int) -> list[str]:
    return (folder / f"asked-{rank}").read_text().split()


async def test_parts_meet_and_are_started_again_together(folder: Path) -> None:
    made = engines(folder)
    try:
        await made.start()
        first, second = part(folder, 0), part(folder, 1)
        assert made.urls == [f"http://127.0.0.1:{first['port']}"]
        assert httpx.get(f"{made.urls[0]}/health").status_code == 200
        assert [p["node-rank"] for p in (first, second)] == ["0", "1"]
        assert {p["nnodes"] for p in (first, second)} == {"2"}
        assert {p["tp-size"] for p in (first, second)} == {"4"}
        assert [p["gpus"] for p in (first, second)] == ["0,1", "6,7"]
        assert first["dist-init-addr"] == second["dist-init-addr"]
        assert await made.mend() == []
        # To make a token for /health would keep a weight sync waiting.
        assert asked(folder, 0)[-3:] == ["/freeze_gc", "/health", "/server_info"]
        assert set(asked(folder, 1)) == {"/health"}

        os.kill(second["pid"], signal.SIGKILL)
        while not (back := await made.mend()):
            time.sleep(0.05)
        assert back == made.urls == [f"http://127.0.0.1:{part(folder, 0)['port']}"]
        assert part(folder, 0)["pid"] != first["pid"]
        assert made.launches(made.urls) == (2,)
        assert {p.name for p in (folder / "logs").iterdir()} == {
            "engine-0-node-0.log",
            "engine-0-node-1.log",
        }
    finally:
        made.end()


async def test_two_who_find_an_engine_down_start_it_once(folder: Path) -> None:
    made = engines(folder)
    try:
        await made.start()
        os.kill(part(folder, 0)["pid"], signal.SIGKILL)
        while not any(backs := await asyncio.gather(made.mend(), made.mend())):
            await asyncio.sleep(0.05)
        assert sorted(backs, key=len) == [[], made.urls]
        assert made.restarts == 1
    finally:
        made.end()


async def test_a_part_that_does_not_come_up_is_told_with_its_log(folder: Path) -> None:
    (folder / "broken-1").touch()
    made = engines(folder)
    try:
        with pytest.raises(EngineError, match="no memory on this node"):
            await made.start()
    finally:
        made.end()
