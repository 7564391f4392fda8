"""An embedded engine on a tiny model, and a trainer of one rank that holds another policy."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.net import free_port

VOCAB = 45
_seeds = itertools.count()
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, with a character tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {f"<{i}>": i for i in range(VOCAB)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<0>", eos_token="<1>", unk_token="<2>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    argv = embedded_argv(model_folder, port, weight_version="start")
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    process = EngineProcess(port)
    process.start(argv, log, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    try:
        process.wait_healthy(400)
        yield process.url
    finally:
        process.stop()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """torch.distributed of one rank within the test process."""
    import torch

    from rlcore.train.ranks import one_rank

    torch.set_num_threads(1)
    with one_rank("cpu"):
        yield


@pytest.fixture
def trainer(process_group: None, model_folder: Path) -> Any:
    """The starting model, every weight changed a little, otherwise in each test."""
    import torch

    from rlcore.train.fsdp.trainer import FsdpTrainer

    made = FsdpTrainer(TrainConfig(), AlgorithmConfig(), temperature=1.0, seed=0, device="cpu")
    made.load(model_folder, "start")
    torch.manual_seed(next(_seeds))
    with torch.no_grad():
        for _, parameter in made._held()[0].weights():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local += 0.05 * torch.randn_like(local)
    return made


def ask(url: str, tokens: list[int]) -> dict[str, Any]:
    """What a greedy request answers."""
    import httpx

    body = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    reply: dict[str, Any] = httpx.post(f"{url}/generate", json=body, timeout=30).json()
    return reply


@pytest.fixture
def greedy(engine_url: str) -> Any:
    """Log-probs of a greedy answer of the engine."""
    return lambda: [p[0] for p in ask(engine_url, [5, 6, 7])["meta_info"]["output_token_logprobs"]]


@pytest.fixture
def version(engine_url: str) -> Any:
    """The version that the engine reports."""
    from rlcore.rollout.client import EngineClient

    async def read() -> str:
        async with EngineClient(engine_url) as client:
            return await client.weight_version()

    return lambda: asyncio.run(read())
