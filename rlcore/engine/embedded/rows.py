"""The running requests as columns: one row each, so that a step over hundreds costs a few array
calls.

`Rows.advance` takes the logits of some rows, chooses their next tokens and says which rows are
done, in SGLang's order: length first, then end-of-sequence and stop ids, then stop strings.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.engine.embedded.protocol import Request
from rlcore.engine.embedded.runner import likeliest
from rlcore.engine.embedded.sampling import Sampled, SamplingBatch, penalise, sample

Ints = npt.NDArray[np.int64]
Decode = Callable[[list[int]], str]

NOT_FINITE: dict[str, object] = {
    "type": "abort",
    "message": "The model's logits are not finite; its weights are broken.",
    "status_code": 500,
    "err_type": "InternalServerError",
}


class Rows:
    """Columns over `capacity` rows. A row is taken by `add` and given back by `free`."""

    def __init__(self, capacity: int, eos: frozenset[int], vocab_size: int, decode: Decode) -> None:
        self._decode = decode
        self._vocab_size = vocab_size
        self._eos = np.zeros(vocab_size, dtype=np.bool_)
        self._eos[[token for token in eos if token < vocab_size]] = True
        self._free = list(range(capacity - 1, -1, -1))
        self.requests: list[Request | None] = [None] * capacity
        self.length: Ints = np.zeros(capacity, dtype=np.int64)
        """Tokens of prompt and answer so far."""
        self.last: Ints = np.zeros(capacity, dtype=np.int64)
        """The newest token, not yet in the cache."""
        self.shift: Ints = np.zeros(capacity, dtype=np.int64)
        """What the prompt's images add to positions."""
        self._left: Ints = np.zeros(capacity, dtype=np.int64)
        self._temperature = np.zeros(capacity, dtype=np.float32)
        self._top_k: Ints = np.zeros(capacity, dtype=np.int64)
        self._top_p = np.zeros(capacity, dtype=np.float32)
        self._min_p = np.zeros(capacity, dtype=np.float32)
        self._seed = np.zeros(capacity, dtype=np.uint64)
        self._ignore_eos = np.zeros(capacity, dtype=np.bool_)
        self._special = np.zeros(capacity, dtype=np.bool_)
        """Rows that need a look of their own at every token."""
        self._counts: dict[int, Tensor] = {}
        """Tokens generated so far, [vocabulary], of rows with penalties."""

    @property
    def available(self) -> int:
        """Free rows."""
        return len(self._free)

    def request(self, row: int) -> Request:
        """The request in a taken row."""
        request = self.requests[row]
        assert request is not None
        return request

    def add(self, request: Request) -> int:
        """Take a row for a request whose seed is set."""
        row, params = self._free.pop(), request.params
        assert request.seed is not None
        self.requests[row] = request
        self.length[row] = len(request.tokens)
        self.shift[row] = 0 if request.images is None else request.images.shift
        self._left[row] = request.max_new_tokens
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = request.seed
        self._ignore_eos[row] = params.ignore_eos
        self._special[row] = bool(
            params.stop
            or params.stop_token_ids
            or params.min_new_tokens
            or params.has_penalties
            or request.top_logprobs
        )
        return row

    def free(self, row: int) -> None:
        """Give a row back."""
        self.requests[row] = None
        self._counts.pop(row, None)
        self._free.append(row)

    def advance(self, rows: Ints, logits: Tensor) -> npt.NDArray[np.bool_]:
        """Choose the next token of `rows` [n] from `logits` [n, vocabulary], which may be changed.
        Returns which of them are done; their requests then say why in `finish`."""
        special = [(i, int(rows[i])) for i in np.flatnonzero(self._special[rows]).tolist()]
        for i, row in special:
            self._shape_logits(row, logits[i])
        sampled = sample(logits, self._batch(rows))
        tokens = sampled.tokens.cpu().numpy()
        logprobs = sampled.logprobs.cpu().numpy()
        broken = ~np.isfinite(logprobs)
        if broken.any():
            tokens = np.where(broken, 0, tokens)
        for row, token, logprob in zip(
            rows.tolist(), tokens.tolist(), logprobs.tolist(), strict=True
        ):
            request = self.request(row)
            request.output.append(token)
            request.logprobs.append(logprob)
        self.last[rows] = tokens
        self.length[rows] += 1
        self._left[rows] -= 1
        return self._finish(rows, tokens, broken, special, sampled)

    def _batch(self, rows: Ints) -> SamplingBatch:
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seed[rows],
            positions=self.length[rows],
        )

    def _shape_logits(self, row: int, logits: Tensor) -> None:
        """Penalties, and no end before `min_new_tokens`, on one row's logits [vocabulary], in
        place.
        """
        request = self.request(row)
        params = request.params
        if params.has_penalties and request.output:
            counts = self._counts.get(row)
            if counts is None:
                counts = self._counts[row] = torch.zeros_like(logits)
            counts[request.output[-1]] += 1
            penalise(
                logits,
                counts,
                params.frequency_penalty,
                params.presence_penalty,
                params.repetition_penalty,
            )
        if len(request.output) < params.min_new_tokens:
            # Stop ids beyond the vocabulary are taken, as SGLang does: they never match.
            stops = {token for token in params.stop_token_ids if 0 <= token < len(logits)}
            logits[list(stops | set(np.flatnonzero(self._eos).tolist()))] = float("-inf")

    def _finish(
        self,
        rows: Ints,
        tokens: Ints,
        broken: npt.NDArray[np.bool_],
        special: list[tuple[int, int]],
        sampled: Sampled,
    ) -> npt.NDArray[np.bool_]:
        full = self._left[rows] == 0
        ended = self._eos[tokens] & ~self._ignore_eos[rows]
        done: npt.NDArray[np.bool_] = full | ended | broken
        for i, row in special:
            request = self.request(row)
            if request.top_logprobs:
                request.top += likeliest(sampled.all_logprobs[i : i + 1], request.top_logprobs)
            if not done[i]:
                request.finish = self._stopped(request)
                done[i] = request.finish is not None
        for i in np.flatnonzero(done).tolist():
            request = self.request(int(rows[i]))
            if broken[i]:
                request.output.pop()
                request.logprobs.pop()
                request.finish = NOT_FINITE
            elif full[i]:
                request.finish = {"type": "length", "length": request.max_new_tokens}
            elif ended[i]:
                request.finish = {"type": "stop", "matched": int(tokens[i])}
        return done

    def _stopped(self, request: Request) -> dict[str, object] | None:
        """The finish reason when the newest token completes a stop id or a stop string."""
        params, token = request.params, request.output[-1]
        if token in params.stop_token_ids and not params.ignore_eos:
            return {"type": "stop", "matched": token}
        if params.stop:
            # A token is at least one character of its text, or a part of one.
            tail = self._decode(request.output[-4 * max(map(len, params.stop)) - 1 :])
            for stop in params.stop:
                if stop in tail:
                    return {"type": "stop", "matched": stop}
        return None
