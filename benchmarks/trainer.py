"""How fast the FSDP2 trainer trains: one optimizer step on packed RL samples, in one micro-batch
and in several; loss, log-probs and metrics included, with float32 master weights.

Needs a GPU. MFU is (6 x parameters x tokens + causal attention) over the time of `train` and over
788 TFLOP/s, which large bfloat16 products reach on an H200; what they reach in this run is beside
it.

    python -m benchmarks.trainer [--shapes qwen3-0.6B qwen3-4B] [--profile FILE]
    python -m benchmarks.trainer --tiny     # on a CPU, to see that it runs
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._common import RESULTS, finish, keep, machine, spread
from benchmarks._shapes import build, shape
from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import TrainSequence
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.models.architecture import Architecture
from rlcore.models.tensors import size_of
from rlcore.train.fsdp.trainer import FsdpTrainer
from rlcore.train.trainer import TrainBatch, TrainStep

PEAK_TFLOPS = 788.0
"""What an H200 reaches in large bfloat16 products: the 100 % of MFU."""
GOALS = {"qwen3-0.6B": 0.45, "qwen3-4B": 0.65}
"""MFU."""


def main() -> int:
    """Runs it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(GOALS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sequences", type=int, default=28)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=4, help="of one more measurement")
    parser.add_argument("--steps", type=int, default=5, help="a repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without torch.compile, too")
    parser.add_argument("--profile", type=Path, help="write the kernels of a step here")
    parser.add_argument("--result", type=Path, default=RESULTS / "trainer.json")
    args = parser.parse_args()
    if args.tiny:
        args.shapes, args.sequences, args.prompt, args.response = ["tiny"], 4, 4, 12
        args.steps = 1
    device = "cpu" if args.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.trainer needs a GPU: torch sees none; --tiny runs on a CPU")
        return 0
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    result: dict[str, Any] = {"benchmark": "trainer", "machine": machine("torch", "transformers")}
    if device == "cuda":
        result["matmul_tflops"] = round(matmul_tflops(), 1)
    result["peak_tflops"], result["shapes"] = PEAK_TFLOPS, {}
    for name in args.shapes:
        for compiled in (True, False) if args.eager else (True,):
            trainer = load(name, device, args, compiled=compiled)
            for count in (1, args.micro_batches) if compiled else (1,):
                way = "" if count == 1 else f", {count} micro-batches"
                way += "" if compiled else ", eager"
                found = measure(trainer, name, args, micro_batches=count)
                result["shapes"][f"{name}{way}"] = found
                print(f"{name}{way}", found, flush=True)
                keep(result | {"met": False}, args.result)
            del trainer
            release()
    mfu = {name: one["mfu"] for name, one in result["shapes"].items() if name in GOALS}
    result["goals"] = {"mfu": GOALS}
    result["met"] = args.tiny or all(mfu[name] >= GOALS[name] for name in mfu)
    return finish(result, args.result)


def load(name: str, device: str, args: argparse.Namespace, *, compiled: bool) -> FsdpTrainer:
    """A trainer of one shape."""
    config = TrainConfig(
        precision="bfloat16",
        max_tokens_per_gpu=args.sequences * (args.prompt + args.response),
        num_iterations=100,
        torch_compile=compiled,
    )
    trainer = FsdpTrainer(config, AlgorithmConfig(), temperature=1.0, seed=0, device=device)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trainer.load(build(name, Path(folder) / "model"), "start")
        print(f"{name}: loaded in {time.perf_counter() - began:.0f} s", flush=True)
    return trainer


def measure(
    trainer: FsdpTrainer, name: str, args: argparse.Namespace, *, micro_batches: int
) -> dict[str, float | dict[str, float]]:
    """Steps of one shape."""
    arch = shape(name)
    parameters = size_of(arch).parameters
    count = 0

    def step() -> dict[str, float]:
        nonlocal count
        batch = make_batch(count, arch.vocab_size, args, micro_batches)
        assert trainer.loaded is not None
        report = trainer.train(trainer.loaded, f"{micro_batches}-{count}", batch)
        count += 1
        return report.metrics

    began = time.perf_counter()
    for _ in range(2):
        step()
    print(f"{name}: two steps to warm up in {time.perf_counter() - began:.0f} s", flush=True)
    cuda = torch.cuda.is_available() and not args.tiny
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    repeats, phases, steps = [], [], max(1, args.steps // micro_batches)
    for _ in range(args.repeats):
        began = time.perf_counter()
        phases += [step() for _ in range(steps)]
        repeats.append((time.perf_counter() - began) / steps)
    lengths = [args.prompt + args.response] * args.sequences * micro_batches
    seconds, flops = statistics.median(repeats), training_flops(arch, parameters, lengths)
    if args.profile is not None and micro_batches == 1:
        kind = "compiled" if trainer._train.torch_compile else "eager"
        profile(step, args.profile.with_name(f"{args.profile.name}-{name}-{kind}.txt"))
    found: dict[str, float | dict[str, float]] = {
        "parameters": parameters,
        "tokens": sum(lengths),
        "seconds": spread(repeats),
        "tokens_per_s": round(sum(lengths) / seconds),
        "mfu": round(flops / seconds / PEAK_TFLOPS / 1e12, 4),
        "forward_backward_s": median(phases, "seconds_forward_backward"),
        "optimizer_s": median(phases, "seconds_optimizer"),
        "train_s": median(phases, "seconds_train"),
    }
    if cuda:
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        # Each gives cached memory back to the driver in the middle of a step.
        found["allocation_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return found


def release() -> None:
    """Give back the memory of a trainer that is gone: the next model is made in another process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats()


def training_flops(arch: Architecture, parameters: int, lengths: list[int]) -> float:
    """Operations of forward and backward: 6 a parameter and token, and causal attention."""
    width = arch.num_attention_heads * arch.head_dim
    attention = 2 * arch.num_hidden_layers * width * sum(s * s for s in lengths)
    return 6.0 * parameters * sum(lengths) + 3.0 * attention


def make_batch(
    iteration: int, vocabulary: int, args: argparse.Namespace, micro_batches: int
) -> TrainBatch:
    """RL samples of random tokens, in one optimizer step."""
    generator = torch.Generator().manual_seed(iteration)
    length, count = args.prompt + args.response, args.sequences * micro_batches
    tokens = torch.randint(vocabulary, (count, length), generator=generator).numpy()
    engine = torch.randn(count, args.response, generator=generator).abs().neg().numpy()
    sequences = tuple(
        TrainSequence(ids, args.response, advantages=float((-1) ** k), rollout_log_probs=engine[k])
        for k, ids in enumerate(tokens)
    )
    micros = tuple(
        sequences[start : start + args.sequences] for start in range(0, count, args.sequences)
    )
    step = TrainStep(micros, Totals.of(s.trainable_tokens for s in sequences))
    return TrainBatch(
        iteration, (step,), samples=count, tokens=count * length, rollout_log_probs=True
    )


def median(reports: list[dict[str, float]], name: str) -> float:
    """Of a metric over steps."""
    return round(statistics.median(report[name] for report in reports), 4)


def matmul_tflops() -> float:
    """What large bfloat16 products reach here."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12


def profile(step: Any, path: Path) -> None:
    """The kernels of a step, by their time, in a text file."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        step()
        torch.cuda.synchronize()
    found.export_chrome_trace(str(path.with_suffix(".json.gz")))
    table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
    path.write_text("\n".join(line[:60] + line[-170:] for line in table.splitlines()))


if __name__ == "__main__":
    sys.exit(main())
