"""An adapter that travels by itself: the engine adds it to the model that it was started with."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import build_config
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.errors import ConfigError, EngineError
from rlcore.net import free_port
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool
from rlcore.train.fsdp.trainer import FsdpTrainer
from rlcore.train.trainer import Lora
from rlcore.weights.sync import SyncSpec, WeightSync

SEQUENCES = [[5, 6, 7, 8, 9], [11, 12, 13]]


@pytest.fixture
def url(model_folder: Path, tmp_path: Path) -> Iterator[str]:
    """An engine that nobody has changed."""
    engine = EngineProcess(free_port())
    port = int(engine.url.rpartition(":")[2])
    engine.start(embedded_argv(model_folder, port, weight_version="0"), tmp_path / "engine.log")
    try:
        engine.wait_healthy(400)
        yield engine.url
    finally:
        engine.stop()


@pytest.fixture
def trainer(process_group: None, model_folder: Path) -> FsdpTrainer:
    """Trains adapters, which do nothing yet."""
    made = FsdpTrainer(
        TrainConfig(),
        AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device="cpu",
        lora=Lora(rank=4, alpha=8.0, targets=("q_proj", "down_proj")),
    )
    made.load(model_folder, "start")
    return made


def move(trainer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer._policy.trained():
            if name.endswith("lora_B"):
                parameter.to_local().copy_(0.2 * torch.randn(parameter.shape))


def asked(url: str, adapter: str | None) -> list[list[float]]:
    async def ask() -> list[list[float]]:
        async with EngineClient(url) as client:
            return await client.prompt_log_probs(SEQUENCES, adapter)

    return asyncio.run(ask())


def generated(url: str, version: str) -> list[float]:
    """Log-probs of what a pool gets that asks for a policy version."""

    async def ask() -> list[float]:
        pool = EnginePool([url], Limits(45, 1024), retries=0, adapters=True)
        pool.version = version
        try:
            params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
            [result] = await pool.generate([GenerateRequest([5, 6, 7], params)])
            return result.log_probs
        finally:
            await pool.close()

    return asyncio.run(ask())


def near(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    return all(a == pytest.approx(b, abs=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_an_engine_adds_each_version_s_adapter_to_its_own_model(
    trainer: Any, url: str, model_folder: Path, tmp_path: Path
) -> None:
    begin = asked(url, None)
    plain = generated(url, "0")
    sync = WeightSync(rank=0)

    def push(version: str) -> None:
        spec = SyncSpec(
            urls=(url,),
            version=version,
            transport="disk",
            dtype="float32",
            model_folder=model_folder,
            scratch=tmp_path / "weights",
            canary_prompts=4,
            canary_tolerance=1e-4,
            vocab_size=45,
            context_length=64,
            as_adapter=True,
        )
        report = sync.run(trainer, spec)
        assert report is not None and report.metrics["canary_abs_diff"] < 1e-5

    answers = []
    for number in (1, 2):
        move(trainer, number)
        push(str(number))
        theirs = asked(url, "policy")
        assert near(trainer.log_probs(SEQUENCES), theirs) and not near(begin, theirs)
        answers.append(generated(url, str(number)))
        [folder] = (tmp_path / "weights").iterdir()
        assert {p.name for p in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
    assert plain not in answers
    with pytest.raises(EngineError, match="holds the adapter 'policy' alone"):
        asked(url, None)

    # Version 0 is the model without one.
    for parameter in (p for n, p in trainer._policy.trained() if n.endswith("lora_B")):
        parameter.data.zero_()
    push("0")
    assert asked(url, None) == begin and generated(url, "0") == plain
    sync.close()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"path": "/m"}}, ("weights.lora_as_adapter", "model.lora_rank")),
        ({"weights": {"transport": "tensor"}}, ("lora_as_adapter", "'tensor'", "use 'disk'")),
        ({"run": {"mode": "fully-async"}}, ("lora_as_adapter", "'fully-async'")),
        ({"rollout": {"engine_urls": ["http://a:1"]}}, ("lora_as_adapter", "engine_urls")),
        (
            {"weights": {"custom_update_weight_post_write_path": "a.py:b"}},
            ("lora_as_adapter", "custom_update_weight_post_write_path"),
        ),
    ],
)
def test_what_an_adapter_cannot_do_is_refused(
    sections: dict[str, Any], words: tuple[str, ...]
) -> None:
    tree: dict[str, Any] = {
        "model": {"path": "/m", "lora_rank": 4},
        "data": {"path": "/d.jsonl"},
        "reward": {"custom_rm_path": "r.py:f"},
    }
    weights = {"lora_as_adapter": True} | sections.get("weights", {})
    assert build_config(tree | {"weights": {"lora_as_adapter": True}})
    with pytest.raises(ConfigError) as caught:
        build_config(tree | sections | {"weights": weights})
    assert all(word in str(caught.value) for word in words), str(caught.value)
