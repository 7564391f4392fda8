"""What `sluice doctor` says where something is wrong."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows.commands import doctor
from flows.commands.doctor import Finding
from flows.commands.stack import Stack
from rlcore.config import load_config
from rlcore.net import free_port

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "run.toml"


@contextmanager
def answering(version: str) -> Iterator[str]:
    """A server that answers as Prefect's API does, but knows no websocket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/api/health": "true", "/api/admin/version": json.dumps(version)}
            self.send_response(200 if self.path in known else 404)
            self.end_headers()
            self.wfile.write(known.get(self.path, "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_of_another_release_and_without_websockets() -> None:
    with answering("2.0.0") as url:
        api, websocket = doctor.prefect_server(url)
    assert (api.level, websocket.level) == ("warn", "fail")
    assert "2.0.0" in api.found and "proxy" in websocket.advice


def test_no_server() -> None:
    [api] = doctor.prefect_server(f"http://127.0.0.1:{free_port()}/api")
    assert api.level == "fail" and "PREFECT_API_URL" in api.advice
    [own] = doctor.prefect_server(None)
    assert own.level == "ok"


def test_no_ray_head_and_one_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.cluster.ray_session.HEAD_PATIENCE_S", 0.3)
    gone = doctor.ray_cluster(f"127.0.0.1:{free_port()}")
    assert gone.level == "fail" and "ray start --head" in gone.advice
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.ray_cluster("auto").level == "ok"
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr(doctor, "RAY_TIMEOUT_S", 3.0)
        found = doctor.ray_cluster(f"127.0.0.1:{deaf.getsockname()[1]}")
    assert found.level == "fail" and "token" in found.advice


def test_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writable, disk = doctor.store(str(tmp_path / "new"))
    assert writable.level == "ok" and disk.name == "disk"
    (tmp_path / "file").write_text("")
    [broken] = doctor.store(str(tmp_path / "file" / "below"))
    assert broken.level == "fail" and broken.advice
    monkeypatch.setattr(doctor, "TOO_LITTLE_DISK", 2**60)
    _, full = doctor.store(str(tmp_path))
    assert full.level == "fail" and "gc" in full.advice


def test_a_stack_that_lost_a_process(tmp_path: Path) -> None:
    stack = Stack.load(str(tmp_path))
    [none] = doctor.running(stack)
    assert none.level == "ok"
    record = {"root": str(tmp_path), "home": "", "api_url": "", "database_url": ""}
    record |= {"ray_address": "", "ray_temp": ""}
    dead = {"worker": {"pid": 2**22 + 1, "started": 1.0, "log": ""}}
    stack.folder.mkdir(exist_ok=True)
    (stack.folder / "stack.json").write_text(json.dumps({**record, "processes": dead}))
    [lost] = doctor.running(Stack.load(str(tmp_path)))
    assert lost.level == "fail" and "worker" in lost.found and "sluice up" in lost.advice


def test_a_configuration_that_train_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = load_config(QUICKSTART, [f"storage.root='{tmp_path / 'root'}'"])
    assert doctor.run_config(good).level == "ok"
    data = good.data.model_copy(update={"path": str(tmp_path / "none.jsonl")})
    found = doctor.run_config(good.model_copy(update={"data": data}))
    assert found.level == "fail" and "none.jsonl" in found.advice


def test_every_package_is_looked_at() -> None:
    found = {f.name: f for f in doctor.versions(None)}
    assert set(doctor.PACKAGES) < set(found)
    assert {f.level for f in found.values()} <= {"ok", "warn"}
    assert all(f.advice or f.level == "ok" for f in found.values())


def test_a_finding_is_a_line_and_its_advice_another(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.say(Finding("store", "fail", "[red] s3://x", "do this"))
    assert capsys.readouterr().out.splitlines() == [
        "fail store          [red] s3://x",
        "                    -> do this",
    ]
