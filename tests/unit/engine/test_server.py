"""The server as a process: starting and ending it, and answering while it computes."""

import base64
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save

from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.errors import EngineError
from rlcore.net import free_port

LONG = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 6000, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    port = free_port()
    engine = EngineProcess(port)
    log = tmp_path_factory.mktemp("server") / "engine.log"
    engine.start(embedded_argv(model_folder, port, weight_version="0"), log)
    try:
        engine.wait_healthy(120)
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def http(server: EngineProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client
        client.post("/continue_generation")
        client.post("/abort_request", json={"abort_all": True})


def wait_load(http: httpx.Client, requests: int) -> None:
    deadline = time.monotonic() + 30
    while http.get("/get_load").json()[0]["num_reqs"] != requests:
        assert time.monotonic() < deadline, f"never {requests} requests"
        time.sleep(0.02)


def in_background(http: httpx.Client, body: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(http.post("/generate", json=body, timeout=60).json())
    )
    thread.start()
    return thread, answers


def test_answers_while_it_generates(http: httpx.Client) -> None:
    thread, answers = in_background(http, {**LONG, "rid": "mine"})
    wait_load(http, 1)
    for path in ("/health", "/health_generate", "/model_info"):
        assert http.get(path, timeout=10).status_code == 200
    assert http.post("/flush_cache").status_code == 400
    assert http.post("/abort_request", json={"rid": "mine"}).status_code == 200
    thread.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_leaves_frees_its_requests(http: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post("/generate", json={**LONG, "input_ids": [[5]] * 3}, timeout=1.0)
    wait_load(http, 0)


def test_weights_over_the_wire(http: httpx.Client, other_folder: Path) -> None:
    blob = base64.b64encode(save(load_file(other_folder / "model.safetensors"))).decode()
    body = {"serialized_named_tensors": [blob], "weight_version": "3", "flush_cache": True}
    refused = http.post("/update_weights_from_tensor", json=body)
    assert refused.status_code == 400
    assert "never loads pickles" in refused.json()["message"]
    done = http.post("/update_weights_from_tensor", json={**body, "load_format": "safetensors"})
    assert done.json() == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to 3.",
        "num_paused_requests": 0,
    }
    assert http.get("/model_info").json()["weight_version"] == "3"


def test_no_generation_while_weights_are_released(http: httpx.Client, model_folder: Path) -> None:
    assert http.post("/release_memory_occupation", json={"tags": ["weights"]}).status_code == 200
    refused = http.post("/generate", json=LONG)
    assert refused.status_code == 503
    assert "weights memory is released" in refused.json()["error"]["message"]
    assert http.get("/health_generate").status_code == 200
    assert http.post("/resume_memory_occupation", json={}).status_code == 400
    assert http.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    refused = http.post("/generate", json=body)
    assert refused.status_code == 503
    assert "update them first" in refused.json()["error"]["message"]
    update = {"model_path": str(model_folder)}
    assert http.post("/update_weights_from_disk", json=update).status_code == 200
    assert http.post("/generate", json=body).status_code == 200
    unknown = http.post("/release_memory_occupation", json={"tags": ["everything"]})
    assert unknown.status_code == 400


def test_server_info_names_the_engine(http: httpx.Client, model_folder: Path) -> None:
    info = http.get("/get_server_info").json()
    assert info["engine"] == "embedded"
    assert (info["context_length"], info["vocab_size"]) == (8192, 2000)
    assert info["model_path"] == str(model_folder)


def test_a_folder_without_config_ends_with_a_sentence(tmp_path: Path) -> None:
    port = free_port()
    argv = embedded_argv(tmp_path, port)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"EngineError: --model-path {tmp_path} is not a Hugging Face model folder: it has no "
        "config.json.\n"
    )
    engine = EngineProcess(port)
    engine.start(argv, tmp_path / "log" / "engine.log")
    with pytest.raises(EngineError) as caught:
        engine.wait_healthy(60)
    assert "ended with exit code 2" in str(caught.value)
    assert "it has no config.json" in str(caught.value)
    assert str(tmp_path / "log" / "engine.log") in str(caught.value)


def test_an_engine_that_never_answers_is_said_to(tmp_path: Path) -> None:
    engine = EngineProcess(free_port())
    engine.start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    with pytest.raises(EngineError, match=r"did not answer /health within 0.3 s"):
        engine.wait_healthy(0.3)
    engine.stop()
    assert not engine.alive()


def test_stop_ends_the_whole_group_even_if_deaf(tmp_path: Path) -> None:
    """A child that ignores SIGTERM, with a child of its own."""
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    engine = EngineProcess(free_port())
    engine.start([sys.executable, "-c", script], tmp_path / "log")
    child = wait_for_pid(tmp_path / "log")
    engine.stop(timeout=0.5)
    assert not engine.alive()
    assert gone(child)


def test_an_engine_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from rlcore.engine.launch import EngineProcess\n"
        "engine = EngineProcess(1)\n"
        "argv = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        f"engine.start(argv, {str(tmp_path / 'engine.log')!r})\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=log)
    child = wait_for_pid(tmp_path / "log")
    assert not gone(child, within=0.1)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(child)


def wait_for_pid(log: Path) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = log.read_text()
        if text.endswith("\n"):
            return int(text)
        time.sleep(0.02)
    raise AssertionError("no pid was printed")


def gone(pid: int, within: float = 10.0) -> bool:
    """Whether the process ends within that many seconds; a zombie has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
