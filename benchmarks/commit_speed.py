"""Speed of committing a rollout batch, against a plain `pyarrow.parquet.write_table`.

The batch has 8,192 samples x 1,024 tokens with log-probs. Both sides write the same table to the
same folder, turn by turn, so that whatever else the machine does meets both. Ours compresses,
digests, fsyncs, publishes by rename, and puts a manifest behind a look at the lease; the plain
side writes a file.

Run: python -m benchmarks.commit_speed [--folder DIR] [--repeats N]
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._common import RESULTS, finish, machine, seconds
from rlcore.sample import Sample, Status
from rlcore.store.batch import SAMPLES, samples_to_table, write_table
from rlcore.store.lease import Lease
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import new_attempt, part_key
from rlcore.store.run_store import RunStore

SAMPLES_COUNT, TOKENS, PROMPT_TOKENS, GROUP = 8192, 1024, 128, 8
GOAL = 0.70


def make_table(count: int) -> pa.Table:
    """A rollout batch with token ids and log-probs distributed like those of a language model."""
    generator = np.random.default_rng(0)
    length = TOKENS - PROMPT_TOKENS
    words = np.array(["the", "so", "we", "have", "x", "=", "therefore", "2", "sum", "answer"])
    samples = []
    for index in range(count):
        ids = np.minimum(generator.zipf(1.25, TOKENS), 151_000)
        log_probs = -generator.gamma(0.3, 1.0, length).astype(np.float32)
        samples.append(
            Sample(
                group_index=index // GROUP,
                index=index,
                prompt_id=f"{index // GROUP:016x}",
                prompt="What is the sum? " * 8,
                label="42",
                tokens=ids.tolist(),
                response=" ".join(generator.choice(words, 600)),
                response_length=length,
                loss_mask=[1] * length,
                rollout_log_probs=log_probs.tolist(),
                weight_versions=["12"],
                status=Status.COMPLETED,
                seed=index,
                metadata={"source": "benchmark"},
            )
        )
    return samples_to_table(samples)


def commit(store: RunStore, lease: Lease, iteration: int, table: pa.Table) -> None:
    """What a rollout stage does with its batch."""
    attempt = new_attempt()
    file = write_table(
        store.objects, part_key(store.run_id, iteration, "rollout", 0, attempt), table
    )
    manifest = Manifest(
        run_id=store.run_id,
        iteration=iteration,
        stage="rollout",
        files=(file,),
        config_digest="0" * 64,
        epoch=lease.epoch,
        attempt=attempt,
    )
    store.commit(manifest, lease)


def measure(folder: Path, table: pa.Table, repeats: int) -> dict[str, Any]:
    """Both sides in turn, the first turn to warm up."""
    store = RunStore(Objects.open(folder / "store"), "bench")
    lease = Lease.acquire(store.objects, "bench")
    plain_file = folder / "plain.parquet"
    ours, plain = [], []
    for turn in range(repeats + 1):
        # A sync in between keeps one side from paying for the other's dirty pages.
        os.sync()
        one = seconds(partial(pq.write_table, table, plain_file))
        os.sync()
        two = seconds(partial(commit, store, lease, turn, table))
        if turn:
            plain.append(one)
            ours.append(two)
    file = store.stage(0, "rollout")
    assert file is not None
    ratios = [a / b for a, b in zip(plain, ours, strict=True)]
    return {
        "plain_write_table_s": [round(s, 4) for s in plain],
        "commit_s": [round(s, 4) for s in ours],
        "ratio_by_turn": [round(r, 3) for r in ratios],
        "ratio": round(statistics.median(ratios), 3),
        "plain_bytes": plain_file.stat().st_size,
        "commit_bytes": file[0].files[0].bytes,
    }


def main() -> int:
    """Measure, write the JSON, say whether the goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="disk to write to (default: a temporary folder)"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--samples", type=int, default=SAMPLES_COUNT)
    parser.add_argument("--result", type=Path, default=RESULTS / "commit_speed.json")
    args = parser.parse_args()
    facts = machine("pyarrow", "numpy")
    table = make_table(args.samples)
    folder = Path(tempfile.mkdtemp(prefix="commit-speed-", dir=args.folder))
    try:
        measured = measure(folder, table, args.repeats)
    finally:
        shutil.rmtree(folder)
    result = {
        "benchmark": "commit_speed",
        "what": "seconds of plain pyarrow.parquet.write_table / seconds of our commit; higher is "
        "better",
        "goal": f"ratio >= {GOAL}",
        "met": measured["ratio"] >= GOAL,
        "batch": {
            "samples": args.samples,
            "tokens_per_sample": TOKENS,
            "columns": len(SAMPLES),
            "raw_bytes": table.nbytes,
        },
        **measured,
        "machine": facts,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
