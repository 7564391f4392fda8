"""What durability costs at real size: writing and reading the batch of one iteration.

The batch has 512 groups x 8 samples x 8,192 tokens: 33.5 million token ids, log-probs and masks,
with the responses' text. Measured, each as seconds and as a share of an iteration of 60 s:

- rollout: the samples (Python lists, as a custom generate function makes them) as Arrow columns;
  encode, digest and store them in parts, look at the lease, put the manifest;
- reward and filter: their narrow parts and manifests;
- lookup: a resumed driver reads and digests the rollout's parts before it believes them;
- trainer: one rank's reading of the batch: the plan's columns and the tokens, as `load_batch` does.

An iteration that is not interrupted pays rollout, reward, filter and trainer, and no lookup.
Beside them, on the same bytes and the same machine, what cannot be beaten: plain
`pyarrow.parquet.write_table` of a table that is there already, a plain write with fsync, SHA-256,
and the making of the table alone (`to_table`, which no Parquet writer is spared).

Run: python -m benchmarks.durability [--groups N] [--store file|s3|both] [--folder DIR]
"""

import argparse
import hashlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._common import REPO, RESULTS, finish, machine, seconds
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.sample import Sample, Status
from rlcore.store.batch import (
    SCORES,
    SELECTION,
    rows_to_table,
    samples_to_table,
    write_samples,
    write_table,
)
from rlcore.store.files import find_damage
from rlcore.store.lease import Lease
from rlcore.store.manifest import FileRef, Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import new_attempt, part_key
from rlcore.store.run_store import RunStore

GROUPS, SIZE, TOKENS, PROMPT_TOKENS = 512, 8, 8192, 192
ITERATION_S, GOAL = 60.0, 0.02
PAID = ("rollout", "reward", "filter", "trainer")
WORLD = 8


def make_samples(groups: int) -> list[Sample]:
    """Token ids and log-probs distributed like those of a language model, and text beside them."""
    generator = np.random.default_rng(0)
    length = TOKENS - PROMPT_TOKENS
    words = np.array(["the", "so", "we", "have", "x", "=", "therefore", "2", "sum", "answer"])
    text = " ".join(generator.choice(words, 4 * length))
    samples = []
    for index in range(groups * SIZE):
        ids = np.minimum(generator.zipf(1.25, TOKENS), 151_000)
        log_probs = -generator.gamma(0.3, 1.0, length).astype(np.float32)
        start = int(generator.integers(0, 8 * length))
        samples.append(
            Sample(
                group_index=index // SIZE,
                index=index,
                prompt_id=f"{index // SIZE:016x}",
                prompt="What is the sum? " * 40,
                label="42",
                tokens=ids.tolist(),
                response=text[start : start + 4 * length],
                response_length=length,
                loss_mask=[1] * length,
                rollout_log_probs=log_probs.tolist(),
                weight_versions=["12"],
                status=Status.COMPLETED,
                seed=index,
            )
        )
    return samples


class Bench:
    """One store."""

    def __init__(self, objects: Objects, samples: list[Sample]) -> None:
        self.objects, self.samples = objects, samples
        self.store = RunStore(objects, "bench")
        self.lease = Lease.acquire(objects, "bench", "bench:1:1")
        self.files: dict[str, list[FileRef]] = {}

    def run(self) -> dict[str, dict[str, float]]:
        """Seconds of each part: on the wall, and of processors, which others' work adds less to."""
        return {name: timed(getattr(self, name)) for name in (*PAID, "lookup")}

    def rollout(self) -> None:
        """What the rollout stage does once all is generated."""
        attempt = new_attempt()
        files = write_samples(
            self.objects,
            lambda part: part_key("bench", 0, "rollout", part, attempt),
            self.samples,
        )
        self._commit("rollout", attempt, files)

    def reward(self) -> None:
        base = {"reward": 1.0, "status": "completed", "details": None, "error": None}
        rows = [
            {"row": n, "prompt_id": s.prompt_id, "group_index": s.group_index, "index": s.index}
            | base
            for n, s in enumerate(self.samples)
        ]
        self._write("reward", rows_to_table(SCORES, rows))

    def filter(self) -> None:
        rows = [
            {
                "row": n,
                "group_index": s.group_index,
                "index": s.index,
                "reward": float(n % SIZE),
                "keep": True,
                "reason": None,
            }
            for n, s in enumerate(self.samples)
        ]
        self._write("filter", rows_to_table(SELECTION, rows))

    def lookup(self) -> None:
        for file in self.files["rollout"]:
            assert find_damage(self.objects, file) is None

    def trainer(self) -> None:
        from rlcore.train.batch import load_batch
        from rlcore.train.trainer import BatchFiles

        files = BatchFiles(
            iteration=0,
            rollout=tuple(self.files["rollout"]),
            reward=tuple(self.files["reward"]),
            selection=tuple(self.files["filter"]),
        )
        # A trainer's process has not seen the file.
        _forget_verified()
        batch = load_batch(
            self.objects,
            files,
            train=TrainConfig(max_tokens_per_gpu=2 * TOKENS, global_batch_size=len(self.samples)),
            algorithm=AlgorithmConfig(),
            rank=0,
            world=WORLD,
        )
        assert batch.samples == len(self.samples)

    def _write(self, stage: str, table: pa.Table) -> None:
        attempt = new_attempt()
        key = part_key("bench", 0, stage, 0, attempt)
        self._commit(stage, attempt, [write_table(self.objects, key, table)])

    def _commit(self, stage: str, attempt: str, files: list[FileRef]) -> None:
        self.files[stage] = files
        manifest = Manifest(
            run_id="bench",
            iteration=0,
            stage=stage,
            files=tuple(files),
            config_digest="0" * 64,
            epoch=self.lease.epoch,
            attempt=attempt,
        )
        self.store.commit(manifest, self.lease)


def timed(act: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a call: on the wall, and of all processors together."""
    cpu = time.process_time()
    wall = seconds(act)
    return {"wall": round(wall, 3), "cpu": round(time.process_time() - cpu, 3)}


def _forget_verified() -> None:
    from rlcore.store import batch

    batch._verified.clear()


def limits(samples: list[Sample], data: bytes, folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of what cannot be beaten, on the same samples and the same bytes."""
    table = samples_to_table(samples)

    def plain_write() -> None:
        with (folder / "plain").open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    acts: dict[str, Callable[[], Any]] = {
        "to_table": lambda: samples_to_table(samples),
        "pyarrow_write_table": lambda: pq.write_table(table, folder / "plain.parquet"),
        "pyarrow_write_table_zstd": lambda: pq.write_table(
            table, folder / "plain.parquet", compression="zstd"
        ),
        "pyarrow_read_table": lambda: pq.read_table(folder / "plain.parquet"),
        "write_and_fsync": plain_write,
        "sha256": lambda: hashlib.sha256(data).digest(),
    }
    return {name: timed(act) for name, act in acts.items()}


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Objects]:
    """An empty root of a kind."""
    if kind == "file":
        yield Objects.open(folder / "root")
        return
    sys.path.insert(0, str(REPO / "tests" / "support"))
    from s3_servers import seaweed_server

    (folder / "weed").mkdir()
    with seaweed_server(folder / "weed") as server:
        yield Objects.open("s3://runs/bench", server.options)


def measure(kind: str, samples: list[Sample], folder: Path) -> dict[str, Any]:
    """One store's figures, with the limits measured beside them."""
    with place(kind, folder) as objects:
        bench = Bench(objects, samples)
        taken = bench.run()
        files = bench.files["rollout"]
        data = b"".join(objects.get(file.key) for file in files)
        beside = limits(samples, data, folder)
        plain = sum(beside[name]["wall"] for name in ("to_table", "pyarrow_write_table"))
        paid, cpu = (sum(taken[name][kind] for name in PAID) for kind in ("wall", "cpu"))
        return {
            "seconds": taken,
            "limits_seconds": beside,
            "parts": len(files),
            "parts_mb": round(len(data) / 1e6, 1),
            "paid_seconds": round(paid, 3),
            "paid_cpu_seconds": round(cpu, 3),
            "share_of_60_s": round(paid / ITERATION_S, 4),
            "rollout_to_plain_pyarrow": round(taken["rollout"]["wall"] / plain, 3),
        }


def main() -> int:
    """Measure, write the result, say whether the goal was met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--store", choices=["file", "s3", "both"], default="both")
    parser.add_argument("--folder", type=Path, help="disk to measure; default: temporary folder")
    options = parser.parse_args()
    facts = machine("pyarrow", "s3fs")
    # A trainer has its modules loaded.
    import rlcore.train.batch  # noqa: F401

    samples = make_samples(options.groups)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stores = {}
    for kind in ("file", "s3") if options.store == "both" else (options.store,):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            stores[kind] = measure(kind, samples, Path(folder))
        time.sleep(1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "command": f"python -m benchmarks.durability --groups {options.groups}",
        "machine": facts,
        "batch": {
            "groups": options.groups,
            "samples": options.groups * SIZE,
            "tokens": options.groups * SIZE * TOKENS,
        },
        "stores": stores,
        "memory_above_samples_mb": round((peak - held) / 1024, 1),
        "goal": {"share_of_60_s": GOAL},
        "met": all(store["share_of_60_s"] < GOAL for store in stores.values()),
    }
    return finish(result, RESULTS / "durability.json")


if __name__ == "__main__":
    sys.exit(main())
