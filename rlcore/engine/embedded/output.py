"""A finished request as SGLang's answer: text, ids, and `meta_info`."""

import base64
import math
import time
from typing import Any

from rlcore.engine.embedded.protocol import Request
from rlcore.engine.embedded.tokenizer import Tokenizer


def answer(request: Request, tokenizer: Tokenizer, started: float) -> dict[str, Any]:
    """The JSON object of one request; `started` is when its call came (time.perf_counter)."""
    prompt = len(request.tokens)
    cached = request.cached_tokens
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "prompt_tokens": prompt,
        "weight_version": request.weight_version,
        "num_retractions": 0,
    }
    if request.earlier:
        # Which SGLang does not say.
        meta["weight_versions"] = [list(policy) for policy in request.policies]
    if request.return_logprob:
        meta["input_token_logprobs"] = [
            [_json(value), token, None]
            for value, token in zip(
                request.input_logprobs, request.tokens[request.logprob_start :], strict=True
            )
        ]
        meta["output_token_logprobs"] = [
            [_json(value), token, None]
            for value, token in zip(request.logprobs, request.output, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(request.output)
        if request.top_logprobs:
            meta["input_top_logprobs"] = [_top(top) for top in request.input_top]
            meta["output_top_logprobs"] = [_top(top) for top in request.top[: len(request.output)]]
    if request.routed:
        meta["routed_experts"] = _experts(request)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(request.output),
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
        "e2e_latency": time.perf_counter() - started,
        "response_sent_to_client_ts": time.time(),
    }
    return {"text": _text(request, tokenizer), "output_ids": request.output, "meta_info": meta}


def _experts(request: Request) -> str:
    """Base64 of int32 [tokens - 1, layers, k]."""
    # The last token was chosen, and sent nowhere.
    rows = len(request.tokens) + len(request.output) - 1
    told = b"".join(part.numpy().tobytes() for part in request.experts)
    size = len(told) // max(1, sum(len(part) for part in request.experts))
    return base64.b64encode(told[: rows * size]).decode()


def _top(top: list[tuple[float, int]] | None) -> list[list[Any]] | None:
    return None if top is None else [[_json(value), token, None] for value, token in top]


def _json(value: float | None) -> float | None:
    """JSON has no infinities: a token that `min_new_tokens` rules out gets the smallest float32."""
    return value if value is None or math.isfinite(value) else -3.4028234663852886e38


def _text(request: Request, tokenizer: Tokenizer) -> str:
    params, finish = request.params, request.finish or {}
    matched = finish.get("matched") if not params.no_stop_trim else None
    ids = request.output[:-1] if isinstance(matched, int) else request.output
    text = tokenizer.decode(ids, params.skip_special_tokens)
    if isinstance(matched, str):
        text = text[: text.index(matched)] if matched in text else text
    return text
