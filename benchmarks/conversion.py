"""How fast `sluice convert` is beside a plain copy of the same safetensors files.

Run: python benchmarks/conversion.py [--layers 12] [--hidden 1024] [--repeats 3] [--folder FOLDER]

Makes a random Qwen3-shaped model in bfloat16, then measures in turn: reading every tensor and
writing it with safetensors (the plain copy), Hugging Face to torch_dist, and torch_dist to Hugging
Face. All are timed until what they write is on disk (fsync); a conversion also computes the digests
of its files.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from _common import RESULTS, finish, machine, seconds, spread

from rlcore.conversion.convert import hf_to_torch_dist, torch_dist_to_hf

GOAL_TIMES = 1.5
"""Seconds of a conversion over those of a copy."""


def make(folder: Path, layers: int, hidden: int) -> int:
    """Write the model; returns its bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def copy(source: Path, target: Path) -> None:
    """Read all tensors and write them again, on disk."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for path in source.glob("*.safetensors"):
        save_file(load_file(path), target / path.name)
        handle = os.open(target / path.name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


Took = dict[str, list[tuple[float, float]]]
"""Seconds, and those of the CPU in all threads, by way of writing."""


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of the CPU, which other work on the machine does not change."""
    began = time.process_time()
    whole = seconds(work)
    return whole, time.process_time() - began


def measure(work: Path, repeats: int) -> Took:
    """What each way of writing the model below `work` took."""
    took: Took = {"copy": [], "to_torch_dist": [], "to_huggingface": []}
    model = work / "model"
    for k in range(repeats):
        plain, dist, back = (work / f"{name}-{k}" for name in ("copy", "dist", "back"))
        took["copy"].append(timed(partial(copy, model, plain)))
        took["to_torch_dist"].append(timed(partial(hf_to_torch_dist, model, dist)))
        took["to_huggingface"].append(timed(partial(torch_dist_to_hf, dist, back, model)))
        for folder in (plain, dist, back):
            shutil.rmtree(folder)
    return took


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--result", type=Path, default=RESULTS / "conversion.json")
    args = parser.parse_args()
    facts = machine("torch", "safetensors")
    work = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        size = make(work / "model", args.layers, args.hidden)
        took = measure(work, args.repeats)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    best = {name: size / min(whole for whole, _ in each) / 1e9 for name, each in took.items()}
    cpu = {name: min(busy for _, busy in each) for name, each in took.items()}
    result = {
        "benchmark": "conversion",
        "what": "GB of weights a second, best of the repeats; higher is better",
        "goal": f"each conversion takes at most {GOAL_TIMES} times as long as a copy",
        "met": best["copy"] <= GOAL_TIMES * min(best.values()),
        "times_a_copy": {name: round(best["copy"] / speed, 2) for name, speed in best.items()},
        "cpu_times_a_copy": {name: round(busy / cpu["copy"], 2) for name, busy in cpu.items()},
        "bytes": size,
        "gb_per_s": {name: round(speed, 3) for name, speed in best.items()},
        "seconds": {name: spread([whole for whole, _ in each]) for name, each in took.items()},
        "cpu_s_per_gb": {name: round(busy / size * 1e9, 3) for name, busy in cpu.items()},
        "machine": facts,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
