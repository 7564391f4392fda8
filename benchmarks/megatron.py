"""Tokens a second of a train step: the Megatron trainer next to FSDP2, on the same packed batch.

    python -m benchmarks.megatron --shape qwen3-0.6B --gpus 1
    python -m benchmarks.megatron --shape qwen3-4B --gpus 2

Each backend and layout runs in processes of its own, one a GPU, on a model of a published shape
with random weights; without a GPU the shape is `tiny` and the device the CPU. With `--save` the
state is saved then: seconds, bytes by rank, and by how much the memory of the rank that grew most
grew. Writes `results/megatron-SHAPE-GPUS.json`. Goal: at one GPU Megatron is at least as fast as
FSDP2.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._common import REPO, RESULTS, ended, finish, keep, machine, own_env, say
from benchmarks._shapes import build, shape

TP, SP = "tensor_model_parallel_size", "sequence_parallel"
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {"fsdp": ("fsdp", {}), "megatron": ("megatron", {})},
    2: {
        "fsdp dp2": ("fsdp", {}),
        "megatron dp2": ("megatron", {}),
        "megatron dp2 without overlap": ("megatron", {"overlap_grad_reduce": False}),
        "megatron tp2": ("megatron", {TP: 2}),
        "megatron tp2 sequence-parallel": ("megatron", {TP: 2, SP: True}),
        "megatron pp2": ("megatron", {"pipeline_model_parallel_size": 2}),
        "megatron cp2": ("megatron", {"context_parallel_size": 2}),
    },
}


def rank_main(job: dict[str, Any], rank: int) -> None:
    """One rank: warm up, measure, and write what was found."""
    import torch
    import torch.distributed as dist

    from rlcore.config.tree import AlgorithmConfig, TrainConfig
    from rlcore.train.make import make_trainer

    device, world = job["device"], job["world"]
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(job["store"], world),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=2),
    )
    trainer = make_trainer(
        TrainConfig(
            backend=job["backend"],
            precision="bfloat16" if device == "cuda" else "float32",
            max_tokens_per_gpu=job["micro_tokens"],
            gradient_checkpointing=job["checkpointing"],
        ),
        AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device=device,
        megatron=job["layout"],
    )
    trainer.load(Path(job["model"]), "0")
    batch = share(job, trainer.ranks.rank, trainer.ranks.size)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], {}
    for step in range(job["warm"] + job["steps"]):
        dist.barrier()
        began = time.perf_counter()
        metrics = trainer.train(str(step), str(step + 1), batch).metrics
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    saving = save(trainer, Path(job["out"]).with_suffix(".state")) if job["saves"] else None
    if rank == 0:
        found = {
            "seconds": seconds[job["warm"] :],
            "tokens": batch.tokens,
            "memory": trainer.memory(),
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "tflops_a_gpu": metrics.get("perf/actor_train_tflops"),
            "saving": saving,
        }
        Path(job["out"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def save(trainer: Any, folder: Path) -> dict[str, Any]:
    """What a state costs: where it is written, how long it takes, and what memory."""
    import shutil

    import torch.distributed as dist

    # From here on the kernel counts the peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    trainer.save_state(folder)
    dist.barrier()
    seconds = time.perf_counter() - began
    growth: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(growth, resident("VmHWM") - before)
    written = [path.stat().st_size for path in sorted(folder.glob("shard-*"))]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"seconds": round(seconds, 3), "bytes_by_rank": written, "host_growth": max(growth)}


def resident(kind: str) -> int:
    """Bytes of this process's memory, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


def share(job: dict[str, Any], rank: int, ranks: int) -> Any:
    """One rank's part of a batch: random tokens, a quarter of each sequence is the prompt."""
    from rlcore.algorithms.aggregate import Totals
    from rlcore.algorithms.packing import TrainSequence
    from rlcore.algorithms.plan import plan
    from rlcore.train.trainer import TrainBatch, TrainStep

    draw = random.Random(0)
    sequences = []
    for _ in range(job["sequences"]):
        length = draw.randint(job["length"] // 2, job["length"])
        response = length - length // 4
        sequences.append(
            TrainSequence(
                tokens=[draw.randrange(job["vocab"]) for _ in range(length)],
                response_length=response,
                advantages=draw.gauss(0, 1),
            )
        )
    lengths = [len(s.tokens) for s in sequences]
    cut = plan(lengths, max_tokens=job["micro_tokens"], dp_size=ranks, num_steps=1)
    steps = tuple(
        TrainStep(
            tuple(tuple(sequences[i] for i in m.samples) for m in step.ranks[rank]),
            Totals.of(sequences[i].trainable_tokens for i in step.samples),
        )
        for step in cut.steps
    )
    return TrainBatch(0, steps, len(sequences), sum(lengths), rollout_log_probs=False)


def measure(job: dict[str, Any], scratch: Path, name: str) -> dict[str, Any]:
    """All ranks of one backend and layout; what they found, or how they failed."""
    tag = name.replace(" ", "-")
    job = job | {"store": str(scratch / f"{tag}.store"), "out": str(scratch / f"{tag}.json")}
    log = scratch / f"{tag}.log"
    with log.open("w") as out:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.megatron", "--rank", str(r), json.dumps(job)],
                cwd=REPO,
                env=own_env(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            for r in range(job["world"])
        ]
        codes = ended(ranks)
    if any(codes):
        return {"failed": log.read_text()[-5000:]}
    found: dict[str, Any] = json.loads(Path(job["out"]).read_text())
    median = sorted(found["seconds"])[len(found["seconds"]) // 2]
    return found | {"tokens_a_second": round(found["tokens"] / median, 1)}


def main() -> int:
    """Measures all layouts of a number of GPUs."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(json.loads(sys.argv[3]), int(sys.argv[2]))
        return 0
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6B" if cuda else "tiny")
    parser.add_argument("--gpus", type=int, default=1, choices=sorted(LAYOUTS))
    parser.add_argument("--sequences", type=int, default=64 if cuda else 8)
    parser.add_argument("--length", type=int, default=2048 if cuda else 64)
    parser.add_argument("--micro-tokens", type=int, default=16384 if cuda else 256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--save", dest="saves", action="store_true", help="measure states, too")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    if cuda and torch.cuda.device_count() < args.gpus:
        raise SystemExit(f"--gpus {args.gpus}, and there are {torch.cuda.device_count()}")
    out = args.result or RESULTS / f"megatron-{args.shape}-{args.gpus}.json"
    facts = machine("torch", "transformers", "megatron-core")
    facts["gpu"] = torch.cuda.get_device_name() if cuda else None
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        job = {
            "model": str(build(args.shape, scratch / "model")),
            "device": "cuda" if cuda else "cpu",
            "world": args.gpus,
            "vocab": shape(args.shape).vocab_size,
            **{k: getattr(args, k) for k in ("sequences", "length", "micro_tokens")},
            **{k: getattr(args, k) for k in ("steps", "warm", "checkpointing", "saves")},
        }
        found = {}
        for name, (backend, layout) in LAYOUTS[args.gpus].items():
            found[name] = measure(job | {"backend": backend, "layout": layout}, scratch, name)
            say(f"{name}: {json.dumps(found[name])}")
            keep({"machine": facts, "found": found, "met": False}, out)
    ours = [v.get("tokens_a_second", 0.0) for k, v in found.items() if k.startswith("megatron")]
    theirs = next(v for k, v in found.items() if k.startswith("fsdp")).get("tokens_a_second", 0.0)
    result = {
        "machine": facts,
        "shape": args.shape,
        "gpus": args.gpus,
        "batch": {k: job[k] for k in ("sequences", "length", "micro_tokens", "checkpointing")},
        "found": found,
        "goal": "the fastest layout of Megatron has at least FSDP2's tokens a second",
        "met": max(ours) >= theirs > 0,
    }
    return finish(result, out)


if __name__ == "__main__":
    sys.exit(main())
