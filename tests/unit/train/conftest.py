"""A tiny model folder, batches of random samples, and ranks in processes of their own."""

import os
import pickle
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_batches import VOCAB, random_sequences, shares

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.train.trainer import Lora, TrainBatch

ROOT = Path(__file__).parents[3]


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


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The helpers above, for test modules."""
    return SimpleNamespace(
        write_model=write_model, random_sequences=random_sequences, shares=shares, vocab=VOCAB
    )


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """torch.distributed of one rank within the test process."""
    import torch

    from rlcore.train.ranks import one_rank

    torch.set_num_threads(1)
    with one_rank("cpu"):
        yield


@pytest.fixture
def make_trainer(process_group: None, model_folder: Path) -> Callable[..., Any]:
    """A loaded trainer of one rank; settings of `train.*` by keyword."""
    from rlcore.train.fsdp.trainer import FsdpTrainer

    def make(
        folder: Path = model_folder,
        algorithm: AlgorithmConfig | None = None,
        temperature: float = 1.0,
        lora: Lora | None = None,
        **settings: Any,
    ) -> FsdpTrainer:
        trainer = FsdpTrainer(
            TrainConfig(**{"lr": 1e-2, "num_iterations": 4} | settings),
            algorithm or AlgorithmConfig(),
            temperature=temperature,
            seed=0,
            device="cpu",
            lora=lora,
        )
        trainer.load(folder, "start")
        return trainer

    return make


class Ranks:
    """Processes that form one trainer; they serve jobs until closed."""

    def __init__(self, world: int, scratch: Path) -> None:
        self._scratch = scratch
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        worker = [sys.executable, str(Path(__file__).parent / "rank_worker.py")]
        self._log = (scratch / f"ranks-{world}.log").open("w+")
        self._ranks = [
            subprocess.Popen(
                [*worker, str(rank), str(world), str(port)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            for rank in range(world)
        ]

    def run(self, model: Path, batches: list[list[TrainBatch]], **job: Any) -> list[dict[str, Any]]:
        """Trains the batches; each rank's result."""
        file = self._scratch / f"job-{uuid.uuid4().hex}"
        full = {
            "model": model,
            "train": TrainConfig(lr=1e-2, num_iterations=4),
            "algorithm": AlgorithmConfig(),
            "batches": batches,
        }
        file.write_bytes(pickle.dumps(full | job))
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{file}\n")
            rank.stdin.flush()
        for rank in self._ranks:
            assert rank.stdout is not None
            said = rank.stdout.readline()
            assert said == "done\n", Path(self._log.name).read_text()[-3000:]
        return [pickle.loads(Path(f"{file}.{r}").read_bytes()) for r in range(len(self._ranks))]

    def close(self) -> None:
        """Ends the processes."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(timeout=120)
        self._log.close()


def _ranks(world: int, scratch: Path) -> Iterator[Ranks]:
    ranks = Ranks(world, scratch)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A trainer of one rank in another process."""
    yield from _ranks(1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A trainer of two ranks."""
    yield from _ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A trainer of four ranks."""
    yield from _ranks(4, tmp_path_factory.mktemp("four"))
