"""Speed of the embedded engine, over HTTP and on one thread.

Mixed: 64 requests with prompts of 8 to 200 tokens and answers of 8 to 96, against
`transformers.generate` on the same prompts as one padded batch, which must run to the longest
answer. Both sample at temperature 1, turn by turn, so that whatever else the machine does meets
both.

Quickstart: the one call of a quickstart iteration, 32 prompts x 16 samples of 4 tokens with
log-probs, on the quickstart's model of 0.8M parameters.

Run: python -m benchmarks.embedded_vs_generate [--model FOLDER] [--repeats N]
"""

import argparse
import random
import runpy
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from benchmarks._common import REPO, RESULTS, finish, machine, seconds
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.net import free_port

REQUESTS, PROMPT, ANSWER = 64, (8, 200), (8, 96)
MIXED_GOAL, QUICKSTART_GOAL_S = 1.0, 0.25
MODEL = REPO / "examples" / "quickstart" / "model.py"


def build_model(folder: Path) -> Path:
    """A random Qwen3 of 10M parameters with the quickstart's tokenizer, in a folder."""
    runpy.run_path(str(MODEL))["build"](folder, 0)
    config = transformers.Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[httpx.Client]:
    """A client of an embedded engine on `model`."""
    port = free_port()
    engine = EngineProcess(port)
    engine.start(embedded_argv(model, port), folder / "engine.log")
    try:
        engine.wait_healthy(120)
        with httpx.Client(base_url=engine.url, timeout=None, trust_env=False) as http:
            yield http
    finally:
        engine.stop()


def post(http: httpx.Client, body: dict[str, Any]) -> None:
    """One /generate call; cached prompts are forgotten first, so that every turn reads its own."""
    http.post("/flush_cache").raise_for_status()
    http.post("/generate", json=body).raise_for_status()


def mixed(model_folder: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Both sides in turn, the first turn to warm up."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, model.config.vocab_size) for _ in range(draw.randint(*PROMPT))]
        for _ in range(REQUESTS)
    ]
    answers = [draw.randint(*ANSWER) for _ in range(REQUESTS)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    body = {
        "input_ids": prompts,
        "sampling_params": [{"max_new_tokens": n, "ignore_eos": True} for n in answers],
        "return_logprob": True,
    }

    @torch.inference_mode()
    def generate() -> None:
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(answers),
            min_new_tokens=max(answers),
            pad_token_id=0,
        )

    theirs, ours = [], []
    with serving(model_folder, folder) as http:
        for turn in range(repeats + 1):
            one, two = seconds(generate), seconds(partial(post, http, body))
            if turn:
                theirs.append(one)
                ours.append(two)
    ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "generate_s": [round(s, 3) for s in theirs],
        "engine_s": [round(s, 3) for s in ours],
        "tokens_wanted": sum(answers),
        "engine_tokens_per_s": round(sum(answers) / statistics.median(ours)),
        "times_faster": round(ratio, 2),
    }


def quickstart(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of the quickstart's generation call."""
    runpy.run_path(str(MODEL))["build"](folder, 0)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4}
    body = {
        "input_ids": [[3 + i % 10, 14] for i in range(32) for _ in range(16)],
        "sampling_params": [{**params, "sampling_seed": i} for i in range(512)],
        "return_logprob": True,
    }
    with serving(folder, folder) as http:
        taken = [seconds(partial(post, http, body)) for _ in range(repeats + 1)][1:]
    return {
        "call_s": [round(s, 4) for s in taken],
        "median_s": round(statistics.median(taken), 4),
        "best_s": round(min(taken), 4),
    }


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder for the mixed requests")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--result", type=Path, default=RESULTS / "embedded_vs_generate.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    facts = machine("torch", "transformers")
    with tempfile.TemporaryDirectory(prefix="embedded-speed-") as name:
        folder = Path(name)
        model = args.model or build_model(folder / "mixed")
        of_mixed = mixed(model, folder, args.repeats)
        of_quickstart = quickstart(folder / "quickstart", 4 * args.repeats)
    met = of_mixed["times_faster"] > MIXED_GOAL and of_quickstart["median_s"] <= QUICKSTART_GOAL_S
    result = {
        "benchmark": "embedded_vs_generate",
        "what": "mixed: seconds of transformers.generate on one padded batch / seconds of the "
        "embedded engine over HTTP; quickstart: seconds of one iteration's generation call",
        "goal": f"times_faster > {MIXED_GOAL:g}; quickstart median_s <= {QUICKSTART_GOAL_S}",
        "met": met,
        "mixed": {"requests": REQUESTS, "prompt": PROMPT, "answer": ANSWER, **of_mixed},
        "quickstart": {"requests": 512, **of_quickstart},
        "machine": {**facts, "threads": 1},
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
