"""A real HTTP server that answers as a test tells it: faults of the network on demand."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.net import free_port

Answer = Callable[[Request], Awaitable[Any]]


class Server:
    """An HTTP server on a free port: `answer` decides what it says, `seen` is what it was asked."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.answer: Answer = self._generate
        self.seen: list[tuple[str, Any]] = []
        self.version = "0"
        self.app.api_route("/{path:path}", methods=["GET", "POST"], response_model=None)(self._any)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()

    async def _any(self, request: Request) -> Any:
        body = await request.body()
        self.seen.append((request.url.path, json.loads(body) if body else None))
        return await self.answer(request)

    def reset(self) -> None:
        self.seen.clear()
        self.answer = self._generate
        self.version = "0"

    def says(self, content: Any, status: int = 200) -> None:
        """Answer everything with this."""

        async def answer(request: Request) -> Any:
            text = content if isinstance(content, (str, bytes)) else json.dumps(content)
            return Response(text, status_code=status)

        self.answer = answer

    async def _generate(self, request: Request) -> Any:
        """Three tokens that depend on the prompt and the seed alone."""
        if request.url.path == "/model_info":
            return {"weight_version": self.version}
        if request.url.path != "/generate":
            return Response("", status_code=200)
        body = json.loads(await request.body())
        await asyncio.sleep(0.005)
        pairs = zip(body["input_ids"], body["sampling_params"], strict=True)
        return [self.one(ids, params) for ids, params in pairs]

    def one(self, ids: list[int], params: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
        seed = params.get("sampling_seed", 0)
        tokens = [(sum(ids) + seed * (k + 7)) % 97 for k in range(min(3, params["max_new_tokens"]))]
        return {
            "text": "".join(chr(t + 32) for t in tokens),
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [[-0.5, t, None] for t in tokens],
                "weight_version": self.version,
                "cached_tokens": 1,
            },
        }

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="session")
def two_servers() -> Iterator[list[Server]]:
    made = [Server(), Server()]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def servers(two_servers: list[Server]) -> list[Server]:
    for server in two_servers:
        server.reset()
    return two_servers


@pytest.fixture
def server(servers: list[Server]) -> Server:
    return servers[0]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and a character tokenizer: what rollouts need of a model."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {t: i for i, t in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = {"model_type": "qwen3", "vocab_size": 128, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def real_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with the character tokenizer."""
    import shutil

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("real")
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=14,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(
    real_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EngineProcess]]:
    logs = tmp_path_factory.mktemp("logs")
    made = []
    for k in range(2):
        port = free_port()
        engine = EngineProcess(port)
        argv = embedded_argv(real_model, port, weight_version="0", context_length=32)
        engine.start(argv, logs / f"{k}.log")
        made.append(engine)
    for engine in made:
        engine.wait_healthy(300)
    yield made
    for engine in made:
        engine.stop()
