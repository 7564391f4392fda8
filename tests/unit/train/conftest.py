"""A tiny model folder, batches of random samples, and ranks in processes of their own."""

import os
import pickle
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import TrainSequence
from rlcore.algorithms.plan import plan
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.train.trainer import TrainBatch, TrainStep

ROOT = Path(__file__).parents[3]
VOCAB = 45


def write_model(folder: Path, architecture: str = "qwen3", **changes: Any) -> Path:
    """A random model of two layers with a one-line tokenizer file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(architecture, **settings | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3")


def random_sequences(count: int, seed: int = 0) -> list[TrainSequence]:
    """Samples of mixed lengths, some with a masked stretch."""
    draw = random.Random(seed)
    sequences = []
    for k in range(count):
        prompt, response = draw.randint(1, 6), draw.randint(1, 12)
        sequences.append(
            TrainSequence(
                tokens=[draw.randrange(2, VOCAB) for _ in range(prompt + response)],
                response_length=response,
                loss_mask=[int(draw.random() < 0.7) for _ in range(response)]
                if k % 3 == 0
                else None,
                advantages=draw.gauss(0, 1),
                rollout_log_probs=[-3.8 + 0.1 * draw.random() for _ in range(response)],
            )
        )
    return sequences


def shares(
    sequences: list[TrainSequence],
    world: int,
    *,
    iteration: int = 0,
    num_steps: int = 1,
    micro_batches: int | None = None,
    max_tokens: int = 10_000,
) -> list[TrainBatch]:
    """The same samples cut for `world` ranks."""
    lengths = [len(s.tokens) for s in sequences]
    whole = plan(
        lengths,
        max_tokens=max_tokens,
        dp_size=world,
        num_steps=num_steps,
        fixed_micro_batches=micro_batches,
    )
    return [
        TrainBatch(
            iteration=iteration,
            steps=tuple(
                TrainStep(
                    tuple(tuple(sequences[i] for i in m.samples) for m in step.ranks[rank]),
                    Totals.of(sequences[i].trainable_tokens for i in step.samples),
                )
                for step in whole.steps
            ),
            samples=len(sequences),
            tokens=sum(lengths),
            rollout_log_probs=True,
        )
        for rank in range(world)
    ]


RunRanks = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run_ranks(tmp_path: Path, model_folder: Path) -> RunRanks:
    """Trains on `world` processes; gives each rank's result."""

    def run(world: int, batches: list[list[TrainBatch]], **job: Any) -> list[dict[str, Any]]:
        job_file = tmp_path / f"job-{world}-{len(list(tmp_path.iterdir()))}"
        full = {
            "model": model_folder,
            "train": TrainConfig(lr=1e-2, num_iterations=4),
            "algorithm": AlgorithmConfig(),
            "batches": batches,
        }
        job_file.write_bytes(pickle.dumps(full | job))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        worker = [sys.executable, str(Path(__file__).parent / "rank_worker.py"), str(job_file)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen(
                [*worker, str(r), str(world), str(port)], env=env, stderr=subprocess.PIPE
            )
            for r in range(world)
        ]
        errors = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
        return [pickle.loads(Path(f"{job_file}.{r}").read_bytes()) for r in range(world)]

    return run
