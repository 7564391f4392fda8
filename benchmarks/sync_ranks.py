"""Seconds of a weight sync from a trainer of two ranks to two engines, by layout and transport.

    python -m benchmarks.sync_ranks

The ranks share each weight (FSDP2's shards, Megatron's tensor-parallel or pipeline parts), gather
it bucket by bucket and rank 0 sends it. On a CPU: gloo, embedded engines, a small model, float32.
On a machine with four GPUs: NCCL, a trainer on two, an engine of SGLang on each of the others,
bfloat16. Writes `results/sync_ranks.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._common import (
    REPO,
    RESULTS,
    ended,
    finish,
    machine,
    own_env,
    parsed,
    say,
    spread,
    tail,
)
from benchmarks._server import SGLANG, serving
from benchmarks._shapes import build, shape

RANKS = ENGINES = 2
CONTEXT = 1024
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "fsdp": ("fsdp", {}),
    "megatron tp2": ("megatron", {"tensor_model_parallel_size": 2}),
    "megatron pp2": ("megatron", {"pipeline_model_parallel_size": 2}),
}
TRANSPORTS = {"cpu": ("tensor", "disk", "distributed"), "cuda": ("disk", "distributed")}
"""Memory of a GPU is handed to an engine on the same one alone."""
LONGEST_S = 900


def rank_main(job: dict[str, Any], rank: int) -> None:
    """One rank: all transports, `repeats` syncs of each after one to warm up."""
    import torch
    import torch.distributed as dist

    from rlcore.config.tree import AlgorithmConfig, TrainConfig
    from rlcore.net import share_as_sglang
    from rlcore.train.make import make_trainer
    from rlcore.weights.sync import WeightSync

    cuda = job["device"] == "cuda"
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    share_as_sglang()
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(job["store"], RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LONGEST_S),
    )
    trainer = make_trainer(
        TrainConfig(backend=job["backend"], precision="bfloat16" if cuda else "float32"),
        AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device=job["device"],
        megatron=job["layout"],
    )
    trainer.load(Path(job["model"]), "start")
    found: dict[str, list[dict[str, float]]] = {}
    for transport in TRANSPORTS[job["device"]]:
        sync = WeightSync(rank)
        for turn in range(job["repeats"] + 1):
            dist.barrier()
            began = time.perf_counter()
            report = sync.run(trainer, spec(job, transport, f"{transport}-{turn}"))
            seconds = time.perf_counter() - began
            if report is not None:
                found.setdefault(transport, []).append({"seconds": seconds, **report.metrics})
        sync.close()
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def spec(job: dict[str, Any], transport: Any, version: str) -> Any:
    """One sync to all engines."""
    from rlcore.weights.sync import SyncSpec

    cuda = job["device"] == "cuda"
    return SyncSpec(
        urls=tuple(job["urls"]),
        version=version,
        transport=transport,
        dtype="bfloat16" if cuda else "float32",
        model_folder=Path(job["model"]),
        scratch=Path(job["scratch"]),
        canary_prompts=2,
        canary_tolerance=0.1 if cuda else 1e-3,
        vocab_size=shape(job["shape"]).vocab_size,
        context_length=CONTEXT,
        starts=(1,) * ENGINES,
        on_gpus=cuda,
        bucket_bytes=job["bucket_mb"] * 2**20,
    )


def measure(job: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Figures of a layout by transport, or the error that ended it."""
    own = folder / name.replace(" ", "-")
    own.mkdir()
    job |= {"store": str(own / "store"), "out": str(own / "out"), "scratch": str(own / "scratch")}
    argv = [sys.executable, "-m", "benchmarks.sync_ranks", "--rank"]
    logs = [own / f"{rank}.log" for rank in range(RANKS)]
    with ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                [*argv, str(rank), json.dumps(job)],
                cwd=REPO,
                env=own_env(),
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        codes = ended(ranks, LONGEST_S)
    if any(codes):
        said = "\n".join(tail(log, 15) for log in logs)
        say(f"{name} failed: {codes}\n{said}")
        return {"error": said}
    taken = json.loads((own / "out").read_text())
    return {
        transport: {
            "first_s": round(turns[0]["seconds"], 4),
            **{key: spread([one[key] for one in turns[1:]]) for key in turns[0]},
        }
        for transport, turns in taken.items()
    }


def main() -> int:
    """Measure all layouts, write the JSON."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(json.loads(sys.argv[3]), int(sys.argv[2]))
        return 0
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", help="default: qwen3-0.6B, or tiny on a CPU")
    parser.add_argument("--tiny", action="store_true", help="on a CPU whatever GPUs there are")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=3, help="after one to warm up")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--server", action="append", default=[], help="an argument of SGLang's")
    parser.add_argument("--result", type=Path, default=RESULTS / "sync_ranks.json")
    args = parser.parse_args()
    cuda = torch.cuda.device_count() >= RANKS + ENGINES and not args.tiny
    args.shape = args.shape or ("qwen3-0.6B" if cuda else "tiny")
    sglang = SGLANG | parsed(args.server) if cuda else None
    with tempfile.TemporaryDirectory(prefix="sluice-sync-") as name, ExitStack() as stack:
        folder = Path(name)
        model = build(args.shape, folder / "model", seed=0)
        other = build(args.shape, folder / "other", seed=1)
        urls = [
            stack.enter_context(
                serving(
                    other,
                    folder / f"engine-{k}.log",
                    sglang=sglang,
                    context=CONTEXT,
                    gpu=RANKS + k if cuda else None,
                )
            )
            for k in range(ENGINES)
        ]
        job = {
            "device": "cuda" if cuda else "cpu",
            "model": str(model),
            "urls": urls,
            **{key: getattr(args, key) for key in ("shape", "repeats", "bucket_mb")},
        }
        found = {}
        for layout in args.layouts.split(","):
            backend, sizes = LAYOUTS[layout]
            own = job | {"backend": backend, "layout": sizes}
            found[layout] = measure(own, folder, layout)
    result = {
        "benchmark": "sync_ranks",
        "what": "seconds of a weight sync, canary included, from two ranks of a trainer to two "
        "engines; the first of each transport is apart",
        "goal": "every layout by every transport",
        "met": all("error" not in one for one in found.values()),
        "shape": args.shape,
        "layouts": found,
        "machine": machine("torch", "transformers", "megatron-core", "sglang"),
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
