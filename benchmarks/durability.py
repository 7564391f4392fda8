"""What durability costs at real size: writing and reading the batch of one iteration.

The batch has 512 groups x 8 samples x 8,192 tokens: 33.5 million token ids, log-probs and masks,
with the responses' text. Measured, each as seconds and as a share of an iteration of 60 s:

- rollout: the samples (Python lists, as a custom generate function makes them) come in calls of 128
  over `GENERATION_S` seconds, as engines give them, and are made Arrow columns, encoded, digested
  and stored in parts meanwhile; from the last call on: the last part, the lease, the manifest;
- rollout_at_once: the same where all samples come at the end;
- reward and filter: their narrow parts and manifests;
- read_ahead: one rank reads the tokens and log-probs, while the samples are scored;
- trainer: that rank's plan and its share, as `load_batch` does, the tokens read;
- lookup: a resumed driver reads and digests the rollout's parts before it believes them.

An iteration that is not interrupted pays rollout, reward, filter and trainer; read_ahead too, by as
much as scoring takes less time than it; it never pays lookup.
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
    SamplesWriter,
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
GENERATION_S = 40.0
CALL = 128
"""Samples of a call, as `EnginePool` cuts them at this length."""
PAID = ("rollout", "reward", "filter", "trainer")
MEASURED = ("rollout_at_once", "rollout", "reward", "filter", "read_ahead", "trainer", "lookup")
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
        out = {}
        for name in MEASURED:
            if name == "rollout":
                out["rollout_beside_generation"] = timed(self.generate)
            out[name] = timed(getattr(self, name))
        return out

    def rollout_at_once(self) -> None:
        attempt = new_attempt()
        files = write_samples(self.objects, self._key_of(attempt), self.samples)
        self._commit("rollout", attempt, files, iteration=1)

    def generate(self) -> None:
        """Samples come in calls; nobody waits for their parts."""
        self.attempt = new_attempt()
        self.writer = SamplesWriter(self.objects, self._key_of(self.attempt))
        calls = range(0, len(self.samples), CALL)
        began = time.perf_counter()
        for number, start in enumerate(calls, 1):
            due = began + number * GENERATION_S / len(calls)
            time.sleep(max(0.0, due - time.perf_counter()))
            self.writer.add(self.samples[start : start + CALL])

    def rollout(self) -> None:
        self._commit("rollout", self.attempt, self.writer.finish())

    def _key_of(self, attempt: str) -> Callable[[int], str]:
        return lambda part: part_key("bench", 0, "rollout", part, attempt)

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

    def read_ahead(self) -> None:
        from rlcore.train.batch import read_rollout

        # A trainer's process has not seen the file.
        _forget_verified()
        self.table = read_rollout(self.objects, self.files["rollout"])

    def trainer(self) -> None:
        from rlcore.train.batch import load_batch
        from rlcore.train.trainer import BatchFiles

        files = BatchFiles(
            iteration=0,
            rollout=tuple(self.files["rollout"]),
            reward=tuple(self.files["reward"]),
            selection=tuple(self.files["filter"]),
        )
        batch = load_batch(
            self.objects,
            files,
            rollout=self.table,
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

    def _commit(self, stage: str, attempt: str, files: list[FileRef], iteration: int = 0) -> None:
        self.files[stage] = files
        manifest = Manifest(
            run_id="bench",
            iteration=iteration,
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
            "share_of_60_s_if_scoring_takes_no_time": round(
                (paid + taken["read_ahead"]["wall"]) / ITERATION_S, 4
            ),
            "rollout_at_once_to_plain_pyarrow": round(taken["rollout_at_once"]["wall"] / plain, 3),
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
