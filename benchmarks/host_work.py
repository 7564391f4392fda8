"""What the host does of an iteration beside generation and training: seconds of its CPU, by piece.

The race's iteration (`benchmarks/race.py`): so many prompts, samples and new tokens. Each piece is
the run's own code on random samples: reading the engine's answer, the figures of a rollout, its
Parquet part, the scores' and the selection's, reading them for training, the rank's batch, and its
micro-batches. CPU seconds, since other work on the machine does not change them; threads count.

Run: python -m benchmarks.host_work [--prompts 32] [--samples 8] [--tokens 512] [--repeats 5]
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks._common import RESULTS, finish, machine, spread

if TYPE_CHECKING:
    from rlcore.train.trainer import TrainStep

PROMPT, VOCABULARY, MAX_TOKENS = 64, 150_000, 16384
GOAL_S = 0.2
T = TypeVar("T")


class Pieces:
    """CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def take(self, name: str, work: Callable[[], T]) -> T:
        """Do it and note what it took."""
        began = time.process_time()
        made = work()
        self.seconds.setdefault(name, []).append(time.process_time() - began)
        return made


def answer(draw: random.Random, samples: int, tokens: int) -> bytes:
    """An engine's answer, as it comes."""
    replies = []
    for _ in range(samples):
        ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
        meta = {
            "finish_reason": {"type": "length", "length": tokens},
            "output_token_logprobs": [[-draw.random() * 12, one, None] for one in ids],
            "weight_version": "3",
            "prompt_tokens": PROMPT,
            "cached_tokens": 0,
            "completion_tokens": tokens,
        }
        replies.append({"text": "word " * tokens, "output_ids": ids, "meta_info": meta})
    return json.dumps(replies).encode()


def one(pieces: Pieces, content: bytes, prompts: int, samples: int, folder: Path) -> None:
    """The pieces in their order."""
    from rlcore.config.tree import AlgorithmConfig, TrainConfig
    from rlcore.rollout.client import EngineClient, GenerateRequest, GenerateResult, no_collection
    from rlcore.rollout.generate import apply_result
    from rlcore.rollout.metrics import rollout_metrics
    from rlcore.rollout.rewards.protocol import Score
    from rlcore.rollout.stored import score_rows, write_rows
    from rlcore.sample import Sample, Status
    from rlcore.store.batch import SamplesWriter
    from rlcore.store.objects import Objects
    from rlcore.train.batch import load_batch, read_rollout
    from rlcore.train.trainer import BatchFiles

    count = prompts * samples
    prompt = list(range(PROMPT))
    client = EngineClient("http://127.0.0.1:1")
    request = GenerateRequest(prompt, {"max_new_tokens": 1})

    def read() -> list[GenerateResult]:
        with no_collection():
            replies = client._read("/generate", content)
            return [client._result(reply, request) for reply in replies]

    results = pieces.take("read_answers", read)
    made = [
        Sample(group_index=k // samples, index=k, prompt_id=f"p{k // samples}", tokens=prompt)
        for k in range(count)
    ]

    def apply() -> dict[str, float]:
        for sample, result in zip(made, results, strict=True):
            apply_result(sample, result)
        return rollout_metrics(made, 1.0, 1)

    pieces.take("figures_of_rollout", apply)
    objects = Objects.open(str(folder))

    def write() -> Any:
        writer = SamplesWriter(objects, lambda part: f"rollout-{part}.parquet")
        writer.add(made)
        files = writer.finish()
        writer.close()
        return files

    rollout = pieces.take("write_rollout", write)
    scores = [Score(float(k % 3), Status.COMPLETED) for k in range(count)]
    rows = score_rows(made, scores)
    kept = [
        {k: row[k] for k in ("row", "group_index", "index", "reward")}
        | {"keep": True, "reason": None}
        for row in rows
    ]
    reward = pieces.take("write_scores", lambda: write_rows(objects, "r.parquet", "reward", rows))
    chosen = pieces.take("write_chosen", lambda: write_rows(objects, "f.parquet", "filter", kept))
    files = BatchFiles(0, tuple(rollout), (reward,), (chosen,))
    table = pieces.take("read_rollout", lambda: read_rollout(objects, files.rollout))
    train = TrainConfig(max_tokens_per_gpu=MAX_TOKENS, global_batch_size=count)
    batch = pieces.take(
        "make_batch",
        lambda: load_batch(
            objects,
            files,
            train=train,
            algorithm=AlgorithmConfig(),
            rank=0,
            world=1,
            rollout=table,
        ),
    )

    pieces.take("micro_batches", lambda: pack_all(batch.steps[0]))


def pack_all(step: "TrainStep") -> None:
    """What a step's micro-batches are as tensors."""
    import torch

    from rlcore.algorithms.packing import pack
    from rlcore.train.credit import MicroBatch

    for micro in step.micro_batches:
        packed = pack(micro, step.totals, "token_mean", log_probs=["rollout_log_probs"])
        MicroBatch.of(packed.inputs(), torch.device("cpu"))


def main() -> int:
    """Measure, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5, help="after one to warm up")
    parser.add_argument("--result", type=Path, default=RESULTS / "host_work.json")
    args = parser.parse_args()
    content = answer(random.Random(0), args.prompts * args.samples, args.tokens)
    pieces = Pieces()
    with tempfile.TemporaryDirectory(prefix="sluice-host-") as folder:
        for _ in range(args.repeats + 1):
            one(pieces, content, args.prompts, args.samples, Path(folder))
    rest = {name: taken[1:] for name, taken in pieces.seconds.items()}
    total = [sum(turn) for turn in zip(*rest.values(), strict=True)]
    result = {
        "benchmark": "host_work",
        "what": "CPU seconds of the host's work beside generation and training, of "
        f"{args.prompts} x {args.samples} x {args.tokens} tokens; the first turn is left out",
        "goal": f"median of all together <= {GOAL_S} s",
        "met": sorted(total)[len(total) // 2] <= GOAL_S,
        "total_s": spread(total),
        "pieces_s": {name: spread(taken) for name, taken in rest.items()},
        "machine": machine("torch", "pyarrow"),
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
