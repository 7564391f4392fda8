"""Runs of a model of a published shape, as the GPU benchmarks start them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._server import SGLANG


@dataclass(frozen=True)
class Size:
    """Of an iteration."""

    shape: str
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    cuda: bool

    @property
    def batch(self) -> int:
        """Samples."""
        return self.prompts * self.samples

    @property
    def context(self) -> int:
        """Longest sequence, and room."""
        return self.prompt_tokens + self.new_tokens + 32


def run_config(size: Size, model: Path, data: Path, iterations: int) -> dict[str, dict[str, Any]]:
    """Settings of a run: one optimizer step an iteration, no state saved meanwhile."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {"path": str(data), "label_key": "label"},
        "rollout": {
            "rollout_batch_size": size.prompts,
            "n_samples_per_prompt": size.samples,
            "max_response_len": size.new_tokens,
            "context_length": size.context,
        },
        "train": {"num_iterations": iterations, "global_batch_size": size.batch, "lr": 1e-6},
        "checkpoint": {"state_interval": 1000},
        "cluster": {"ray_address": "local", "device": "cpu"},
    }
    if size.cuda:
        tree["rollout"]["engine"] = "sglang"
        tree["train"] |= {"precision": "bfloat16", "max_tokens_per_gpu": 16384}
        tree["cluster"]["device"] = "cuda"
        tree["sglang"] = dict(SGLANG)
    return tree
