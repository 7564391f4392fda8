"""Code is made once, when the trainer loads: batches of other shapes have none made again.

The way through a layer is that of a GPU, with a stand-in for FlashAttention: what would be compiled
there is counted here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from rlcore.algorithms import logprob_kernels, logprobs
from rlcore.config.tree import AlgorithmConfig
from rlcore.images.model import attend
from rlcore.train.fsdp import attention, model
from rlcore.train.fsdp.attention import ATTENTION
from rlcore.train.fsdp.trainer import FsdpTrainer

pytestmark = pytest.mark.timeout(600)
SMALL_CHUNK = 45 * 50
"""Logits of 50 rows."""
Counted = Callable[..., tuple[Any, CompileCounter]]


@torch.library.custom_op("sluice_test::uneven", mutates_args=())
def _uneven(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float
) -> Tensor:
    """Has the signature of attention over uneven sequences, and answers the query."""
    return query.clone()


@_uneven.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_key = grad[:, : ctx.heads] * 0.0
    return grad, of_key, of_key.clone(), None, None, None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.heads = inputs[1].shape[1]


_uneven.register_autograd(_backward, setup_context=_keep)


@pytest.fixture
def counted(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Makes a trainer that compiles as on a GPU, with what counts the compilations."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(FsdpTrainer, "_compiles", True)
    monkeypatch.setattr(logprobs, "_is_compiled", lambda z: len(z) > 1)
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", SMALL_CHUNK)
    monkeypatch.setattr(attention, "_takes_uneven", lambda query, value: True)

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *rest: Any, **more: Any) -> Tensor:
        out: Tensor = _uneven(q, k, v, bounds, rest[1], more["scale"])
        return out

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    # Such attention is no model's.
    monkeypatch.setattr(model, "_probe", lambda policy, _: attend(policy.lm, ATTENTION))
    logprob_kernels._compiled.cache_clear()
    torch._dynamo.reset()

    def make(**settings: Any) -> tuple[Any, CompileCounter]:
        return make_trainer(max_tokens_per_gpu=256, **settings), counter

    with torch._dynamo.config.patch(specialize_float=True):
        yield make
    logprob_kernels._compiled.cache_clear()
    torch._dynamo.reset()


def batches_compile_nothing(trainer: Any, counter: CompileCounter, toy: Any) -> None:
    """Train on batches of other shapes."""
    made, state = counter.frame_count, "start"
    # Several micro-batches of several chunks, one of a single chunk, one of a single sequence.
    for number, samples in enumerate((40, 7, 1)):
        batch = toy.shares(toy.random_sequences(samples, seed=number), 1, max_tokens=256)[0]
        trainer.train(state, f"after-{number}", batch)
        state = f"after-{number}"
        assert counter.frame_count == made, f"batch {number}"


def test_nothing_is_compiled_after_the_load(counted: Counted, toy: Any) -> None:
    trainer, counter = counted()
    assert counter.frame_count > 0
    batches_compile_nothing(trainer, counter, toy)


def test_of_layers_with_experts_attention_alone_is_compiled(
    counted: Counted, toy: Any, tmp_path: Path
) -> None:
    folder = toy.write_model(
        tmp_path / "model",
        "qwen3_moe",
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=8,
    )
    trainer, counter = counted(folder=folder)
    modules = trainer._policy.lm.named_modules()
    compiled = {name for name, m in modules if hasattr(m.forward, "_torchdynamo_orig_callable")}
    assert compiled == {
        "model.layers.0.self_attn",
        "model.layers.1",
        "model.layers.2.self_attn",
    }
    batches_compile_nothing(trainer, counter, toy)


def test_compiled_layers_come_to_the_same_numbers(
    make_trainer: Any, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    batch = toy.shares(toy.random_sequences(9), 1, max_tokens=64)[0]
    plain = make_trainer().train("start", "next", batch).metrics
    monkeypatch.setattr(FsdpTrainer, "_compiles", True)
    with torch._dynamo.config.patch(specialize_float=True):
        found = make_trainer().train("start", "next", batch).metrics
    torch._dynamo.reset()
    # To train and to score, sequences of one length and of several: each in one piece.
    assert 0 < counter.frame_count <= 4
    for name in ("loss", "grad_norm", "entropy"):
        assert found[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7), name


@pytest.mark.slow
def test_nor_by_a_reference_several_steps_and_an_entropy(counted: Counted, toy: Any) -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
    trainer, counter = counted(algorithm=algorithm, num_steps_per_rollout=2)
    made = counter.frame_count
    batch = toy.shares(toy.random_sequences(24), 1, num_steps=2, max_tokens=256)[0]
    report = trainer.train("start", "next", batch)
    assert counter.frame_count == made
    assert {"seconds_log_probs", "seconds_ref_log_probs"} <= report.metrics.keys()
