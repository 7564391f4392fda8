"""Choosing tokens: temperature, top-k, top-p, min-p, penalties, and a seed for every request.

Invariants:
- Row i of every result depends on row i of the inputs alone, so a request samples the same tokens
  in any batch. One uniform number a (seed, position), from a counter-based hash, picks by inverse
  CDF.
- Log-probabilities are those of softmax(logits / temperature), before any filter, as SGLang reports
  them (plain logits where the temperature is 0).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64s = npt.NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: UInt64s) -> UInt64s:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: UInt64s, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), both [n]."""
    stream = _mix(seeds + np.uint64(_GAMMA))
    counter = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    bits = _mix(stream ^ _mix(counter)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request; sample 0 keeps the request's own."""
    if index == 0:
        return seed & _MASK
    mixed = _mix(np.array([(seed + index * _GAMMA) & _MASK], dtype=np.uint64))
    return int(mixed[0])


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the rows of one sampling call need, each array [n]."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    """-1: no limit."""
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: UInt64s
    positions: npt.NDArray[np.int64]
    """Position in the sequence of the token to choose."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen tokens [n], their log-probabilities [n], and all log-probabilities [n,
    vocabulary].
    """

    tokens: Tensor
    logprobs: Tensor
    all_logprobs: Tensor


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Choose one token for each row of `logits` [n, vocabulary] (float32)."""
    greedy = batch.temperature == 0.0
    if not greedy.all():
        divisor = np.where(greedy, np.float32(1), batch.temperature)
        logits = logits / torch.from_numpy(divisor).to(logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        tokens = logits.argmax(dim=-1)
    else:
        tokens = _draw(torch.softmax(logits, dim=-1), batch)
        if greedy.any():
            at = torch.from_numpy(np.flatnonzero(greedy)).to(logits.device)
            tokens[at] = logits[at].argmax(dim=-1)
    return Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def _draw(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """Inverse-CDF draw of one token a row, after that row's filters."""
    u = torch.from_numpy(uniforms(batch.seeds, batch.positions)).to(probs.device)
    tokens = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    filtered = (batch.top_k != -1) | (batch.top_p < 1.0) | (batch.min_p > 0.0)
    # Filters need a sort; rows without one are spared it, and choose the same token either way.
    plain = np.flatnonzero(~filtered)
    if len(plain):
        at = torch.from_numpy(plain).to(probs.device)
        tokens[at] = _inverse_cdf(probs if len(plain) == len(probs) else probs[at], u[at])
    rest = np.flatnonzero(filtered)
    if len(rest):
        at = torch.from_numpy(rest).to(probs.device)
        kept, ids = _filter(probs[at], batch, rest)
        tokens[at] = ids.gather(1, _inverse_cdf(kept, u[at])[:, None])[:, 0]
    return tokens


def _inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulated probability exceeds u x the row's total."""
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    target = (u * cumulated[:, -1])[:, None]
    # right=True never lands on an entry of probability 0: its sum equals the one before it.
    chosen = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return chosen.clamp_(max=probs.shape[-1] - 1)


def _filter(
    probs: Tensor, batch: SamplingBatch, rows: npt.NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """(probabilities sorted downwards with the filtered ones 0, their token ids), in SGLang's
    order: top-k, then top-p over the unfiltered sums, then min-p against the largest.
    """

    def column(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values[rows]).to(probs.device)[:, None]

    kept, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    rank = torch.arange(kept.shape[-1], device=probs.device)[None]
    top_k = column(np.where(batch.top_k == -1, kept.shape[-1], batch.top_k))
    drop = (
        (rank >= top_k)
        | (before > column(batch.top_p))
        | (kept < kept[:, :1] * column(batch.min_p))
    )
    return kept.masked_fill(drop, 0.0), ids


def penalise(
    logits: Tensor, counts: Tensor, frequency: float, presence: float, repetition: float
) -> None:
    """Lower, in place, the logits [vocabulary] of tokens generated before, `counts` [vocabulary]
    times.

    Frequency and presence subtract (once a time, and once); repetition divides positive logits and
    multiplies negative ones (Keskar et al., CTRL, 2019)."""
    seen = counts > 0
    logits -= frequency * counts + presence * seen
    if repetition != 1.0:
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, scaled, logits))
