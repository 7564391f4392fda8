"""TRL's GRPOTrainer as one side of a race: makes one step whenever it is told to.

A line on standard input asks for a step. Lines that begin with `PEER ` are its answers, as JSON:
first that it is ready, then each step's seconds and the GPU's peak memory. It generates by
`model.generate`, its faster mode without vLLM.

Run: python -m benchmarks._peer JSON, with the keys of `Task`
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """What is trained."""

    model: str
    prompts: list[str]
    prompts_a_step: int
    samples: int
    tokens: int
    micro_batch: int
    max_steps: int
    cuda: bool


def tell(answer: Mapping[str, Any]) -> None:
    """Answer whoever asked."""
    sys.stdout.write(f"PEER {json.dumps(answer)}\n")
    sys.stdout.flush()


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """A cheap reward that differs within a group."""
    return [sum(map(ord, text[-16:])) % 7 / 7 for text in completions]


def settings(task: Task, folder: str) -> dict[str, Any]:
    """Of GRPOConfig."""
    batch = task.prompts_a_step * task.samples
    return {
        "output_dir": folder,
        "per_device_train_batch_size": task.micro_batch,
        "gradient_accumulation_steps": batch // task.micro_batch,
        "num_generations": task.samples,
        "max_completion_length": task.tokens,
        "generation_kwargs": {"min_new_tokens": task.tokens},
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_steps": task.max_steps,
        "bf16": task.cuda,
        "use_cpu": not task.cuda,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "bfloat16" if task.cuda else "float32"},
    }


def train(task: Task, folder: str) -> None:
    """Make steps until no more is asked for."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turns(TrainerCallback):
        """Waits before each step, and tells how long it took."""

        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not sys.stdin.readline():
                sys.exit(0)
            if task.cuda:
                torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if task.cuda:
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 1e9 if task.cuda else 0.0
            seconds = time.perf_counter() - self.began
            # The other side has its turn now, and may want the room.
            torch.cuda.empty_cache()
            tell({"seconds": seconds, "peak_gb": round(peak, 1)})

    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    wanted = settings(task, folder)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    # TRL needs one; `min_new_tokens` keeps it from being sampled.
    tokenizer.eos_token = tokenizer.unk_token
    trainer = GRPOTrainer(
        model=task.model,
        reward_funcs=reward,
        args=GRPOConfig(**{name: value for name, value in wanted.items() if name in known}),
        train_dataset=Dataset.from_dict({"prompt": task.prompts}),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    dtype = str(next(trainer.model.parameters()).dtype)
    tell({"ready": True, "weights": dtype, "unknown": sorted(wanted.keys() - known)})
    trainer.train()


def main() -> int:
    """Be the peer."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        try:
            train(task, folder)
        except Exception as error:
            tell({"error": f"{type(error).__name__}: {error}"[:2000]})
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
