"""Write down anew what a real SGLang answers to the requests of the contract.

    python tests/contract/record_contract.py                         # starts SGLang on a GPU
    python tests/contract/record_contract.py --url URL --model DIR   # asks one that runs
    ... [--out FILE]

The requests, and their order, are those of the recording that there is. Two of them end a server;
they are not sent, and what the recording says of them stays. Answers that `test_contract.py` would
call different from the old ones are listed at the end: each is a change of SGLang's that clients
and the embedded engine may have to follow.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from test_contract import RECORDING, RECORDS, Replay, Server
from test_contract import test_answers_as_recorded as check
from tiny_model import build

from rlcore.engine.launch import EngineProcess
from rlcore.engine.sglang import sglang_argv
from rlcore.net import free_port

ARGUMENTS = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.2,
}
START_S = 600.0
CUT = 2700
"""Characters that are kept of the settings of a server."""
ABORTED = "cut: text, output_ids and output_token_logprobs hold what was generated before the abort"


@contextmanager
def started() -> Iterator[Server]:
    """A server of a tiny model with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "model", head_dim=64)
        engine = EngineProcess(free_port())
        port = int(engine.url.rpartition(":")[2])
        try:
            engine.start(sglang_argv(model, port, extra=ARGUMENTS), Path(folder) / "engine.log")
            engine.wait_healthy(START_S)
            yield Server(engine.url, str(model), embedded=False)
        finally:
            engine.stop()


def record(replay: Replay) -> list[dict[str, Any]]:
    """The recording with the answers of a replay in place of its own."""
    seen: dict[str, int] = {}
    out = []
    for old in RECORDS:
        name = old["name"]
        nth = seen.setdefault(name, 0)
        seen[name] += 1
        new = dict(old)
        if (name, nth) in replay.answers:
            new["status"], answer = replay.answers[name, nth]
            new["response"] = shortened(name, without_folder(answer, replay.server.model))
        out.append(new)
    return out


def without_folder(answer: Any, folder: str) -> Any:
    """An answer that says MODEL for the model's folder."""
    return json.loads(json.dumps(answer).replace(json.dumps(folder)[1:-1], "MODEL"))


def shortened(name: str, answer: Any) -> Any:
    """What is kept of an answer: not what was sampled for long, nor all settings of the server."""
    if name == "server_info":
        return json.dumps(answer)[:CUT]
    if isinstance(answer, dict) and name == "aborted_generate":
        return {"note": ABORTED, "finish_reason": [answer["meta_info"]["finish_reason"]]}
    if isinstance(answer, dict) and name in ("generate_stop_str", "generate_stop_token_ids"):
        return {"meta_info": answer["meta_info"], "n_output_ids": len(answer["output_ids"])}
    return answer


def changes(replay: Replay) -> list[str]:
    """Answers that are not as the recording has them, with what differs."""
    out = []
    seen: dict[str, int] = {}
    for old in RECORDS:
        nth = seen.setdefault(old["name"], 0)
        seen[old["name"]] += 1
        if (old["name"], nth) in replay.answers:
            try:
                # It takes parts of the record out as it compares.
                check(replay, json.loads(json.dumps(old)), nth)
            except (AssertionError, KeyError) as error:
                out.append(f"{old['name']}: {str(error) or error!r}".splitlines()[0])
    return out


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Record SGLang's answers.")
    parser.add_argument("--url", help="of a server that runs; default: one is started")
    parser.add_argument("--model", help="its model's folder, as the server sees it")
    parser.add_argument("--out", type=Path, default=RECORDING)
    options = parser.parse_args()
    if bool(options.url) != bool(options.model):
        parser.error("--url and --model belong together")
    if options.url:
        write(Server(options.url.rstrip("/"), options.model, embedded=False), options.out)
    else:
        with started() as server:
            write(server, options.out)


def write(server: Server, out: Path) -> None:
    """Ask a server everything, write the recording, and say what has changed."""
    replay = Replay(server)
    replay.run()
    changed = changes(replay)
    lines = [json.dumps(one) + "\n" for one in record(replay)]
    out.write_text("".join(lines), encoding="utf-8")
    release = replay.get("/get_server_info").get("version", "of unknown version")
    sys.stdout.write(f"{len(replay.answers)} answers of SGLang {release} in {out}\n")
    sys.stdout.write("".join(f"changed: {line}\n" for line in changed))


if __name__ == "__main__":
    main()
