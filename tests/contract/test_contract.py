"""Replay the recorded conversation with a real SGLang 0.5.16 and compare every answer.

`sglang-http-contract.jsonl` holds what a real server said, one exchange a line. The same requests
are sent in the same order, with generation running in the background where it ran then; each answer
must have the recorded status code, keys, types and finish reasons, and error texts that say the
same. Where the embedded engine differs on purpose, `DIFFERENT` says how.

It runs against the embedded engine, or against a real server: set SLUICE_CONTRACT_URL (its address)
and SLUICE_CONTRACT_MODEL (its model folder, as the server sees it; weights are updated from there).
"""

import importlib
import json
import os
import re
import runpy
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.net import free_port

RECORDING = Path(__file__).with_name("sglang-http-contract.jsonl")
RECORDS: list[dict[str, Any]] = [json.loads(line) for line in RECORDING.read_text().splitlines()]

DIFFERENT: dict[str, tuple[int, str]] = {
    "bad_param": (400, "Unexpected sampling parameter 'nonsense'"),
    "kills_server_out_of_vocab_id": (400, "outside the vocabulary"),
    "kills_server_update_while_paused_with_retract": (400, "'retract' ends a real server"),
    "get_weights_by_name": (404, "Not Found"),
    "weights_checker": (404, "Not Found"),
    "chat": (404, "Not Found"),
    "completions": (404, "Not Found"),
}
"""What the embedded engine answers otherwise: status code and a part of the text. A real server
answers an unknown parameter with 500 and dies of the next two, which are never sent to one; the
last four belong to APIs that the embedded engine does not offer.
"""

SERVER_INFO_KEYS = {
    "model_path",
    "tokenizer_path",
    "dtype",
    "max_running_requests",
    "tp_size",
    "dp_size",
}
"""The recorded /get_server_info is some 400 settings of that server; these are what clients
read.
"""

SAMPLED = {"generate_stop_str", "generate_stop_token_ids"}
"""Whether these stop early is up to the sampled tokens."""

STARTS_BACKGROUND = {"abort_rid", "abort_all", "pause_in_place", "pause_abort"}
ENDS_BACKGROUND = {"abort_rid", "abort_all", "abort_all_after_continue", "pause_abort"}
"""A long generation ran while the first were sent; it had ended after the second."""

NULLABLE = {"cached_tokens_details", "context_length", "max_running_requests"}


@dataclass(frozen=True)
class Server:
    """Where the server is, what it serves, and whether it is ours."""

    url: str
    model: str
    embedded: bool


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server."""
    url = os.environ.get("SLUICE_CONTRACT_URL")
    if url:
        yield Server(url.rstrip("/"), os.environ["SLUICE_CONTRACT_MODEL"], embedded=False)
        return
    folder = tmp_path_factory.mktemp("contract")
    build = runpy.run_path(str(Path(__file__).with_name("tiny_model.py")))["build"]
    model = build(folder / "model")
    engine = EngineProcess(free_port())
    port = int(engine.url.rsplit(":", 1)[1])
    engine.start(embedded_argv(model, port), folder / "engine.log")
    try:
        engine.wait_healthy(120)
        yield Server(engine.url, str(model), embedded=True)
    finally:
        engine.stop()


class Replay:
    """Sends the recorded requests to a server and keeps the answers, by name and occurrence."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # A real server closes the connection after an error of its own; each request has its own.
        self.http = httpx.Client(
            base_url=server.url,
            timeout=120,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.context = int(self.get("/v1/models")["data"][0]["max_model_len"])
        self.answers: dict[tuple[str, int], tuple[int, Any]] = {}

    def get(self, path: str) -> Any:
        return self.http.get(path).json()

    def run(self) -> None:
        seen: dict[str, int] = {}
        background: list[threading.Thread] = []
        for record in RECORDS:
            name = record["name"]
            if name == "aborted_generate" or (
                name.startswith("kills_server") and not self.server.embedded
            ):
                continue
            if name in STARTS_BACKGROUND:
                background.append(self.start_background(len(background)))
            self.answers[name, seen.setdefault(name, 0)] = self.send(name, record)
            seen[name] += 1
            if name in ENDS_BACKGROUND:
                background[-1].join()

    def start_background(self, nth: int) -> threading.Thread:
        """Send the long generation number `nth`, and return once it runs."""
        record = next(r for r in RECORDS if r["name"] == "aborted_generate")

        def generate() -> None:
            self.answers["aborted_generate", nth] = self.send("aborted_generate", record)

        thread = threading.Thread(target=generate)
        thread.start()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self.get("/get_load")[0]["num_reqs"] > 0:
                break
            time.sleep(0.02)
        time.sleep(0.3)
        return thread

    def send(self, name: str, record: dict[str, Any]) -> tuple[int, Any]:
        path, body = record["path"], record["request"]
        if name == "bad_too_long":
            body = {
                "input_ids": [5] * (self.context + 808),
                "sampling_params": {"max_new_tokens": 6},
            }
        if name == "aborted_generate":
            body = json.loads(json.dumps(body))
            body["sampling_params"]["max_new_tokens"] = min(6000, self.context - 2)
        if name == "kills_server_update_while_paused_with_retract":
            path, body = "/pause_generation", {"mode": "retract"}
        if isinstance(body, dict) and body.get("model_path") == "MODEL":
            body = {**body, "model_path": self.server.model}
        content = body if isinstance(body, str) else None if body is None else json.dumps(body)
        reply = self.http.request(
            record["method"], path, content=content, headers={"Content-Type": "application/json"}
        )
        return reply.status_code, parsed(reply.text)

    def fill(self) -> None:
        """Give weights that were released, as the recording did, their values again."""
        update = {"model_path": self.server.model, "weight_version": "8"}
        assert self.http.post("/update_weights_from_disk", json=update).json()["success"]


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.fixture(scope="module")
def replay(server: Server) -> Replay:
    replay = Replay(server)
    replay.run()
    return replay


def cases() -> list[Any]:
    seen: dict[str, int] = {}
    out = []
    for record in RECORDS:
        nth = seen.setdefault(record["name"], 0)
        seen[record["name"]] += 1
        out.append(pytest.param(record, nth, id=f"{record['name']}-{nth}"))
    return out


@pytest.mark.parametrize(("record", "nth"), cases())
def test_answers_as_recorded(replay: Replay, record: dict[str, Any], nth: int) -> None:
    name = record["name"]
    if (name, nth) not in replay.answers:
        pytest.skip("ends a real server, so it is not sent to one")
    status, answer = replay.answers[name, nth]
    if replay.server.embedded and name in DIFFERENT:
        expected_status, part = DIFFERENT[name]
        assert status == expected_status
        assert part in json.dumps(answer)
        return
    assert status == record["status"], answer
    expected = record["response"]
    expected = parsed(expected) if isinstance(expected, str) and name != "server_info" else expected
    if name == "server_info":
        assert not SERVER_INFO_KEYS - set(answer)
    elif name == "aborted_generate":
        assert_aborted(answer)
    elif status >= 400:
        assert_same_refusal(name, expected, answer)
    elif name in SAMPLED:
        assert_alike({"meta_info": expected["meta_info"]}, {"meta_info": answer["meta_info"]}, name)
    else:
        assert_alike(expected, answer, name)
    if record["path"] == "/generate" and status == 200:
        for one in answer if isinstance(answer, list) else [answer]:
            assert_consistent(one)


def assert_alike(expected: Any, answer: Any, place: str) -> None:
    """Same keys, same types, same list lengths, the same finish reason."""
    if place.endswith("finish_reason") and place.split(".")[0] in SAMPLED:
        assert answer["type"] in ("length", "stop")
        return
    if place.split(".")[-1] in NULLABLE and (expected is None or answer is None):
        return
    assert type(answer) is type(expected), f"{place}: {answer!r} is not like {expected!r}"
    if isinstance(expected, dict) and ".top_logprobs[" in place:
        # Its keys are the texts of tokens.
        assert all(isinstance(value, float) for value in answer.values()), place
    elif isinstance(expected, dict):
        assert set(answer) == set(expected), place
        for key in expected:
            assert_alike(expected[key], answer[key], f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(answer) == len(expected) or place.endswith("architectures"), place
        for i, (one, other) in enumerate(zip(expected, answer, strict=False)):
            assert_alike(one, other, f"{place}[{i}]")
    elif place.endswith(("finish_reason.type", ".message", ".status", ".object", ".success")):
        assert answer == expected, place


def assert_aborted(answer: dict[str, Any]) -> None:
    reason = answer["meta_info"]["finish_reason"]
    assert reason == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert answer["output_ids"], "an aborted request keeps what it has"
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


def assert_consistent(answer: dict[str, Any]) -> None:
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert meta["completion_tokens"] == len(ids)
    if "output_token_logprobs" in meta:
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
        assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])


def assert_same_refusal(name: str, expected: Any, answer: Any) -> None:
    """The same envelope, and a text that says the same; numbers depend on the model served."""
    assert type(answer) is type(expected)
    if not isinstance(expected, dict):
        return
    assert set(answer) == set(expected)
    if name == "bad_json":
        assert "JSON decode error" in answer["message"]
    elif name == "update_from_disk_bad":
        assert answer["success"] is False
        assert "/nonexistent" in answer["message"] or "nonexistent" in answer["message"]
    else:
        assert numberless(expected) == numberless(answer)


def numberless(answer: Any) -> str:
    return re.sub(r"\d+", "#", json.dumps(answer))


def test_greedy_log_probs_are_of_the_plain_logits(replay: Replay) -> None:
    """A greedy token is the likeliest, with its log-probability unscaled by the temperature 0."""
    replay.fill()
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 1,
    }
    meta = replay.http.post("/generate", json=body).json()["meta_info"]
    assert [top[0] for top in meta["output_top_logprobs"]] == meta["output_token_logprobs"]


def test_memory_comes_back_in_parts(replay: Replay) -> None:
    """Weights are there to be updated before the cache is; then all is generated as before."""
    replay.fill()
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
    }

    def generated() -> Any:
        return replay.http.post("/generate", json=body).json()["output_ids"]

    def memory(action: str, *tags: str) -> None:
        reply = replay.http.post(f"/{action}_memory_occupation", json={"tags": tags})
        assert reply.status_code == 200, reply.text

    before = generated()
    assert replay.http.post("/flush_cache").status_code == 200
    memory("release", "kv_cache", "weights", "cuda_graph")
    memory("resume", "weights")
    replay.fill()
    memory("resume", "kv_cache", "cuda_graph")
    assert generated() == before


def test_weight_version_follows_updates(replay: Replay) -> None:
    _, before = replay.answers["model_info", 0]
    _, after = replay.answers["model_info_after", 0]
    _, generated = replay.answers["generate_after_update", 0]
    assert (before["weight_version"], after["weight_version"]) == ("default", "7")
    assert generated["meta_info"]["weight_version"] == "8"


def test_a_recording_anew_says_the_same(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the embedded engine, but for what it answers otherwise on purpose."""
    monkeypatch.syspath_prepend(str(RECORDING.parent))
    recorder = importlib.import_module("record_contract")
    made = recorder.record(replay)
    assert [one["name"] for one in made] == [one["name"] for one in RECORDS]
    assert replay.server.model not in json.dumps(made)
    for new, old in zip(made, RECORDS, strict=True):
        if replay.server.embedded and new["name"] in DIFFERENT:
            continue
        assert (new["request"], new["status"]) == (old["request"], old["status"])
        text = old["response"]
        was = parsed(text) if isinstance(text, str) and new["name"] != "server_info" else text
        assert type(new["response"]) is type(was), new["name"]
        if isinstance(new["response"], dict) and new["status"] == 200:
            assert set(new["response"]) == set(was), new["name"]
    if not replay.server.embedded:
        assert recorder.changes(replay) == []
