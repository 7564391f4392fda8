"""Tokens a second of a train step on a mixture of experts: the Megatron trainer with all experts
multiplied together, next to one after another, and FSDP2, on the same packed batch.

    python -m benchmarks.megatron_experts

On a GPU the layers are those of Qwen3-30B-A3B with half its experts and fewer of them, in bfloat16;
without one they are tiny, and the device is the CPU. Each way runs in a process of its own. Writes
`results/megatron_experts.json`. Goal: together is faster than one after another.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, finish, machine
from benchmarks.megatron import measure

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one after another": ("megatron", {}),
    "together": ("megatron", {"moe_grouped_gemm": True}),
    "fsdp": ("fsdp", {}),
}
LARGE = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}


def build(fields: dict[str, Any], folder: Path, *, cuda: bool) -> Path:
    """A model folder with random weights."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **fields, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=4096
    )
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16 if cuda else torch.float32)
    model.save_pretrained(folder)
    del model
    if cuda:
        torch.cuda.empty_cache()
    return folder


def main() -> int:
    """Measures all ways."""
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32 if cuda else 8)
    parser.add_argument("--length", type=int, default=2048 if cuda else 64)
    parser.add_argument("--micro-tokens", type=int, default=16384 if cuda else 256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--result", type=Path, default=RESULTS / "megatron_experts.json")
    args = parser.parse_args()
    facts, fields = machine("torch", "transformers", "megatron-core"), LARGE if cuda else TINY
    batch = {k: getattr(args, k) for k in ("sequences", "length", "micro_tokens")}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        job = {
            "model": str(build(fields, scratch / "model", cuda=cuda)),
            "device": "cuda" if cuda else "cpu",
            "world": 1,
            "vocab": fields["vocab_size"],
            "steps": args.steps,
            "warm": args.warm,
            "checkpointing": False,
            "saves": False,
            **batch,
        }
        found = {
            name: measure(job | {"backend": backend, "layout": layout}, scratch, name)
            for name, (backend, layout) in WAYS.items()
        }
    speed = {name: one.get("tokens_a_second", 0.0) for name, one in found.items()}
    apart, together = speed["one after another"], speed["together"]
    result = {
        "machine": facts,
        "shape": fields,
        "batch": batch,
        "found": found,
        "times_as_fast": round(together / apart, 2) if apart else None,
        "goal": "together is faster than one after another",
        "met": together > apart > 0,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
