"""Sampling on its own: the right distribution, filters as SGLang orders them, noise by counter."""

import numpy as np
import pytest
import torch

from rlcore.engine.embedded.sampling import (
    SamplingBatch,
    derive_seed,
    penalise,
    sample,
    uniforms,
)


def batch(rows: int, **columns: float) -> SamplingBatch:
    """The same settings for every row, seeds 0, 1, 2, ..."""

    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.full(rows, columns.get(name, default), dtype=dtype)

    return SamplingBatch(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", -1, np.int64),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
        positions=column("position", 7, np.int64),
    )


PROBABILITIES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def frequencies(rows: int = 40_000, **columns: float) -> torch.Tensor:
    logits = PROBABILITIES.log().expand(rows, -1)
    tokens = sample(logits, batch(rows, **columns)).tokens
    return torch.bincount(tokens, minlength=5) / rows


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    u = uniforms(seeds, np.zeros(20_000, dtype=np.int64))
    v = uniforms(seeds, np.ones(20_000, dtype=np.int64))
    assert ((u >= 0) & (u < 1)).all()
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    # Chi-square with 19 degrees of freedom: 43.8 is its 99.9 % quantile.
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.03
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def test_a_seed_of_sample_zero_is_the_requests_own() -> None:
    assert derive_seed(12, 0) == 12
    assert derive_seed(-1, 0) == 2**64 - 1
    assert len({derive_seed(12, i) for i in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        # A token stays while the probability before it is at most top_p.
        ({"top_p": 0.65}, [0.4 / 0.7, 0.3 / 0.7, 0, 0, 0]),
        ({"top_p": 0.75}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"min_p": 0.3}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"top_k": 3, "top_p": 0.35, "min_p": 0.1}, [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_come_with_their_probabilities(
    columns: dict[str, float], expected: list[float]
) -> None:
    got = frequencies(**columns)
    assert got.tolist() == pytest.approx(expected, abs=0.012)
    assert (got[torch.tensor(expected) == 0] == 0).all()


def test_temperature_sharpens() -> None:
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert frequencies(temperature=0.5).tolist() == pytest.approx(sharp.tolist(), abs=0.012)


def test_log_probs_are_before_filters() -> None:
    logits = PROBABILITIES.log().expand(50, -1)
    got = sample(logits, batch(50, top_k=1))
    assert got.tokens.tolist() == [0] * 50
    assert got.logprobs.tolist() == pytest.approx([float(PROBABILITIES[0].log())] * 50)


def test_greedy_rows_beside_sampled_ones() -> None:
    settings = batch(2)
    settings.temperature[0] = 0.0
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    got = sample(logits, settings)
    assert int(got.tokens[0]) == 1, "the first of equals"
    assert float(got.logprobs[0]) == pytest.approx(float(torch.log_softmax(logits[0], -1)[1]))


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(
        5000, -1
    )
    assert set(sample(logits, batch(5000)).tokens.tolist()) == {1, 3}


def test_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    penalise(logits, torch.tensor([2.0, 1.0, 0.0]), 0.5, 0.25, 1.0)
    assert logits.tolist() == [0.75, -2.75, 1.0]
    logits = torch.tensor([2.0, -2.0, 1.0])
    penalise(logits, torch.tensor([2.0, 1.0, 0.0]), 0.0, 0.0, 2.0)
    assert logits.tolist() == [1.0, -4.0, 1.0]
