"""The experts of an engine, from its answer by way of the store into the trainer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.errors import DataError, EngineError
from rlcore.net import free_port
from rlcore.rollout.client import EngineClient, GenerateRequest, GenerateResult
from rlcore.rollout.generate import apply_result
from rlcore.rollout.limits import Limits
from rlcore.sample import Sample
from rlcore.store.batch import (
    SCORES,
    SELECTION,
    read_parts,
    rows_to_table,
    samples_to_table,
    table_to_samples,
    write_table,
)
from rlcore.store.objects import Objects
from rlcore.train.batch import _Samples, load_batch
from rlcore.train.trainer import BatchFiles

EXPERTS = {
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
PROMPTS = [[5, 9, 3], [7, 7, 8, 4, 2], [5, 9, 3]]
PARAMS = {"max_new_tokens": 9, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def moe_folder(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: experts, a dense one, experts."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    return Path(toy.write_model(folder, "qwen3_moe", **EXPERTS))


@pytest.fixture(scope="module")
def limits(moe_folder: Path) -> Limits:
    return Limits.of_model(moe_folder)


@pytest.fixture(scope="module")
def url(moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    engine = EngineProcess(port)
    argv = embedded_argv(moe_folder, port, routed_experts=True)
    engine.start(argv, tmp_path_factory.mktemp("log") / "engine.log")
    engine.wait_healthy(600)
    yield engine.url
    engine.stop()


@pytest.fixture(scope="module")
def results(url: str, limits: Limits) -> list[GenerateResult]:
    async def ask() -> list[GenerateResult]:
        requests = [
            GenerateRequest(p, PARAMS | {"sampling_seed": 3 + i}, routed_experts=True)
            for i, p in enumerate(PROMPTS)
        ]
        async with EngineClient(url, limits) as client:
            return await client.generate(requests)

    return asyncio.run(ask())


def test_the_engine_tells_what_transformers_chooses(
    results: list[GenerateResult], moe_folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(moe_folder, dtype=torch.float32)
    for prompt, result in zip(PROMPTS, results, strict=True):
        told = result.routed_experts
        assert told is not None and told.shape == (len(prompt) + 8, 3, 2)
        ids = torch.tensor([prompt + result.tokens[:-1]])
        out = model(ids, output_router_logits=True, use_cache=False)
        for layer, logits in zip((0, 2), out.router_logits, strict=True):
            chosen = logits.topk(2).indices.sort().values
            assert np.array_equal(np.sort(told[:, layer]), chosen.numpy())
        assert not told[:, 1].any()


def stored(results: list[GenerateResult], objects: Objects) -> BatchFiles:
    samples = []
    for i, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        sample = Sample(group_index=0, index=i, prompt_id="p", tokens=list(prompt))
        apply_result(sample, result)
        samples.append(sample)
    row = [{"row": i, "group_index": 0, "index": i, "reward": float(i)} for i in range(3)]
    more = {"prompt_id": "p", "status": "completed", "details": None, "error": None}
    scores = rows_to_table(SCORES, [r | more for r in row])
    chosen = rows_to_table(SELECTION, [r | {"keep": True, "reason": None} for r in row])
    return BatchFiles(
        0,
        (write_table(objects, "rollout.parquet", samples_to_table(samples)),),
        (write_table(objects, "reward.parquet", scores),),
        (write_table(objects, "filter.parquet", chosen),),
    )


def test_the_trainer_s_experts_are_the_engine_s(
    results: list[GenerateResult], make_trainer: Any, moe_folder: Path, tmp_path: Path
) -> None:
    objects = Objects.open(str(tmp_path))
    batch = load_batch(
        objects,
        stored(results, objects),
        train=TrainConfig(global_batch_size=3),
        algorithm=AlgorithmConfig(),
        rank=0,
        world=1,
        experts=True,
    )
    trainer = make_trainer(moe_folder)
    policy = trainer._policy
    with torch.no_grad():
        # Weights that choose others.
        for name, weight in policy.weights():
            if name.endswith("mlp.gate.weight"):
                weight.neg_()
    policy.routing.watches = True
    metrics = trainer.train("start", "next", batch).metrics
    [micro] = batch.steps[0].micro_batches
    told = np.concatenate([sequence.experts for sequence in micro])
    seen = policy.routing.seen().numpy()
    assert np.array_equal(seen[:, [0, 2]], told[:, [0, 2]])
    assert {len(r.tokens) + len(p) - 1 for p, r in zip(PROMPTS, results, strict=True)} == {
        len(s.experts) for s in micro
    }
    assert metrics["grad_norm"] > 0


def test_a_stored_choice_takes_about_a_byte(tmp_path: Path) -> None:
    objects, rng = Objects.open(str(tmp_path)), np.random.default_rng(0)
    sizes = []
    for experts in (None, rng.integers(0, 128, (1000, 24, 8), dtype=np.int32)):
        sample = Sample(
            group_index=0,
            index=0,
            prompt_id="p",
            tokens=[1] * 1001,
            response_length=1,
            rollout_log_probs=[-1.0],
            rollout_routed_experts=experts,
        )
        sizes.append(write_table(objects, f"{experts is None}", samples_to_table([sample])).bytes)
    assert sizes[1] - sizes[0] < 1.05 * 1000 * 24 * 8


def test_tokens_behind_the_engine_s_last_word_go_anywhere(
    results: list[GenerateResult], tmp_path: Path
) -> None:
    objects = Objects.open(str(tmp_path))
    samples = table_to_samples(read_parts(objects, stored(results, objects).rollout))
    samples[0].append_response_tokens([4, 4], trainable=False)
    table = samples_to_table(samples)
    first = _Samples(table, None, experts=True).sequence(0, 1.0, (), 9)
    assert first.experts is not None and len(first.experts) == 13
    samples[1].rollout_routed_experts = None
    with pytest.raises(DataError, match="sample 1 of the rollout has no routed experts"):
        _Samples(samples_to_table(samples), None, experts=True).sequence(1, 1.0, (), 9)


def test_what_an_engine_cannot_tell_is_said(url: str, model_folder: Path) -> None:
    async def ask(limits: Limits | None) -> None:
        async with EngineClient(url, limits) as client:
            await client.generate([GenerateRequest([5, 9], PARAMS, routed_experts=True)])

    with pytest.raises(EngineError, match="the model has none"):
        asyncio.run(ask(Limits.of_model(model_folder)))
    with pytest.raises(EngineError, match=r"tells 60 routed experts for 11 tokens of 4 layers"):
        asyncio.run(ask(Limits(45, 64, routes=(4, 2))))
