"""Layers of megatron-core as torch compiles them: the same numbers, and code that is made once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import tiny_families
import torch
from torch._dynamo.testing import CompileCounter

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.train.megatron.trainer import MegatronTrainer

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts what a trainer compiles, as on a GPU."""
    made = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=made))
    monkeypatch.setattr(MegatronTrainer, "_compiles", True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        yield made
    torch._dynamo.reset()


def trained(folder: Path, batches: list[Any], **train: Any) -> list[dict[str, float]]:
    trainer = MegatronTrainer(
        TrainConfig(max_tokens_per_gpu=256, **train),
        AlgorithmConfig(entropy_coef=0.01),
        temperature=1.0,
        seed=0,
        device="cpu",
    )
    trainer.load(folder, "0")
    return [trainer.train(str(k), str(k + 1), one).metrics for k, one in enumerate(batches)]


def slow(family: str, recompute: bool) -> Any:
    return pytest.param(family, recompute, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("qwen3", False),
        ("glm4_moe", True),
        ("qwen3_moe", False),
        ("deepseek_v3", False),
        slow("qwen3", True),
        slow("llama", False),
        slow("glm4", True),
    ],
)
def test_numbers_are_the_same_and_code_is_made_at_the_load(
    family: str, recompute: bool, process_group: None, toy: Any, tmp_path: Path, counter: Any
) -> None:
    tiny_families.build(family, tmp_path)
    batches = [
        toy.shares(toy.random_sequences(count, seed=count), 1, max_tokens=256)[0]
        for count in (40, 7, 1)
    ]
    settings = {"gradient_checkpointing": recompute}
    compiled = trained(tmp_path, batches[:0], **settings)
    made = counter.frame_count
    assert (made > 0) == (family != "deepseek_v3")
    compiled = trained(tmp_path, batches, **settings)
    assert counter.frame_count == made
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MegatronTrainer, "_compiles", False)
        plain = trained(tmp_path, batches, **settings)
    for one, other in zip(compiled, plain, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
