"""How many bytes a weight sync sends as changes, beside all weights, and how long each part takes.

Run: python benchmarks/delta_sync.py [--hidden 512] [--layers 8] [--steps 4] [--json FILE]

Trains a random Qwen3-shaped model on random samples by GRPO, a step a version, at learning rates of
1e-6 and 1e-5, and publishes each version with bfloat16 and float32 weights through a store on the
local disk. Beside it stands what the XOR of the bits comes to under the same zstd, the other way
that was thought of. Every version that a mirror made is compared with the weights bit by bit.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from _common import RESULTS, finish, machine, spread
from safetensors import safe_open

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import TrainSequence
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.store.objects import Objects
from rlcore.train.fsdp.trainer import FsdpTrainer
from rlcore.train.trainer import DType, TrainBatch, TrainStep
from rlcore.weights.delta.mirror import Mirror, bits_of
from rlcore.weights.delta.publisher import Publisher

GOAL_SHARE = 0.1
"""Of all bytes, for bfloat16 at either rate."""
VOCAB = 8192
FILE_BYTES = 512 * 2**20


def make(folder: Path, layers: int, hidden: int) -> None:
    """Write the model that is trained."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


def batch(iteration: int) -> TrainBatch:
    """Random samples with random advantages, one optimizer step."""
    draw = random.Random(iteration)
    sequences = tuple(
        TrainSequence(
            tokens=[draw.randrange(VOCAB) for _ in range(80)],
            response_length=64,
            advantages=draw.gauss(0, 1),
            rollout_log_probs=[-9.0] * 64,
        )
        for _ in range(8)
    )
    totals = Totals.of(s.trainable_tokens for s in sequences)
    return TrainBatch(iteration, (TrainStep((sequences,), totals),), 8, 640, True)


def xor_bytes(old: Path, new: Path) -> int:
    """What the XOR of all bits has under the same compression."""
    codec, total = pa.Codec("zstd", compression_level=1), 0
    for file in new.glob("*.safetensors"):
        with safe_open(str(file), "pt") as after, safe_open(str(old / file.name), "pt") as before:
            for name in after.keys():  # noqa: SIM118
                pair = [bits_of(held.get_tensor(name)) for held in (before, after)]
                total += len(codec.compress((pair[0] ^ pair[1]).tobytes(), asbytes=True))
    return total


def equal(folder: Path, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a folder holds these weights, bit for bit."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(str(file), "pt") as held:
        return set(held.keys()) == set(tensors) and all(
            torch.equal(held.get_tensor(name), tensor) for name, tensor in tensors.items()
        )


def measure(work: Path, rate: float, dtype: DType, steps: int) -> dict[str, Any]:
    """One learning rate and type of weights."""
    trainer = FsdpTrainer(
        TrainConfig(lr=rate, num_iterations=steps + 1),
        AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device="cpu",
    )
    trainer.load(work / "model", "0")
    place = work / f"{rate}-{dtype}"
    objects = Objects.open(place / "store")
    publisher = Publisher(objects, "b", place / "own", base_interval=steps, part_bytes=FILE_BYTES)
    mirror = Mirror(objects, place / "mirror", FILE_BYTES)
    rows: list[dict[str, float]] = []
    folders: list[Path] = []
    for step in range(steps + 1):
        if step:
            trainer.train(str(step - 1), str(step), batch(step))
        began = time.perf_counter()
        ref = publisher.publish(str(step), "{}", trainer.named_tensors(dtype))
        published = time.perf_counter()
        folders.append(mirror.pull(ref))
        pulled = time.perf_counter()
        if not equal(folders[-1], dict(trainer.named_tensors(dtype))):
            raise SystemExit(f"version {step} at {rate}, {dtype}: other weights than the trainer's")
        xor = xor_bytes(*folders[-2:]) if step else 0
        rows.append(
            publisher.figures
            | {"publish": published - began, "pull": pulled - published, "xor": float(xor)}
        )
    whole, changes = rows[0], rows[1:]
    return {
        "lr": rate,
        "weights": dtype,
        "bytes": int(whole["bytes"]),
        "whole_share": round(whole["delta_share"], 4),
        "delta_share": spread([row["delta_share"] for row in changes]),
        "xor_share": spread([row["xor"] / row["bytes"] for row in changes]),
        "whole_seconds": {k: round(whole[k], 3) for k in ("publish", "pull")},
        "publish_seconds": spread([row["publish"] for row in changes]),
        "pull_seconds": spread([row["pull"] for row in changes]),
    }


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, default=RESULTS / "delta_sync.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine("torch", "transformers", "pyarrow")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    types: tuple[DType, DType] = ("bfloat16", "float32")
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        make(work / "model", given.layers, given.hidden)
        rows = [measure(work, rate, t, given.steps) for t in types for rate in (1e-6, 1e-5)]
    dist.destroy_process_group()
    half = [row for row in rows if row["weights"] == "bfloat16"]
    result = {
        "machine": facts,
        "shape": {"hidden": given.hidden, "layers": given.layers, "vocabulary": VOCAB},
        "goal": f"at most {GOAL_SHARE} of all bytes with bfloat16 weights, fewer than by XOR",
        "rows": rows,
        "met": all(
            row["delta_share"]["median"] <= GOAL_SHARE
            and row["delta_share"]["median"] < row["xor_share"]["median"]
            for row in half
        ),
    }
    return finish(result, given.json)


if __name__ == "__main__":
    sys.exit(main())
