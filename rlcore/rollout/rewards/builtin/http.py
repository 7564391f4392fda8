"""Requests to servers that score: several at once, sent again where that may help.

Invariants:
- A request ends with an answer or with a `NoRewardError` that says what the server said; never
  with a made-up reward.
- A connection that fails, a 429 and a 5xx are tried again, up to `reward.retries` times, with
  growing pauses; any other answer that is no 2xx is final.
"""

import asyncio
import json
import random
import time
from typing import Any

import httpx

from rlcore.rollout.rewards.protocol import NoRewardError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
AGAIN = frozenset([408, 425, 429, 500, 502, 503, 504])
SHOWN = 200
"""Characters of a server's answer that an error shows."""

_clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}


async def post(
    url: str,
    body: dict[str, Any],
    *,
    retries: int,
    timeout_s: float,
    within_s: float,
    headers: dict[str, str] | None = None,
) -> Any:
    """The JSON that a server answers to a JSON body.

    Args:
        url: where to send it.
        body: what to send.
        retries: how often a request that failed is sent again.
        timeout_s: seconds that one request may take.
        within_s: seconds that all of them may take: none is sent that would begin later.
        headers: of the request.

    Raises:
        NoRewardError: no request had an answer that is JSON.
        asyncio.CancelledError: it was cancelled; the message is what the last request met.
    """
    client, content = _client(), json.dumps(body, default=str).encode()
    head = {"content-type": "application/json"} | (headers or {})
    began, tries, failure = time.monotonic(), 0, ""
    try:
        for attempt in range(retries + 1):
            tries += 1
            wait = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
            try:
                answer = await client.post(url, content=content, headers=head, timeout=timeout_s)
            except httpx.HTTPError as error:
                failure = f"{url} gave no answer: {type(error).__name__}: {error}".rstrip(": ")
            else:
                if answer.is_success:
                    return _json(url, answer)
                failure = f"{url} answered {answer.status_code}: {answer.text[:SHOWN]}"
                if answer.status_code not in AGAIN:
                    raise NoRewardError(failure)
                wait = _asked_wait(answer.headers.get("retry-after"), wait)
            if attempt == retries or time.monotonic() - began + wait > within_s:
                break
            await asyncio.sleep(wait)
    except asyncio.CancelledError:
        raise asyncio.CancelledError(*([failure] if failure else [])) from None
    raise NoRewardError(f"{failure} ({tries} tries)" if tries > 1 else failure)


def _client() -> httpx.AsyncClient:
    """One client an event loop, so that connections are used again."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        for old in [known for known in _clients if known.is_closed()]:
            del _clients[old]
        _clients[loop] = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
        )
    return _clients[loop]


def _json(url: str, answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise NoRewardError(f"{url} answered what is no JSON: {answer.text[:SHOWN]}") from None


def _asked_wait(said: str | None, own: float) -> float:
    """The pause that a server asks for in whole seconds, if it is longer than the own one."""
    return max(own, min(float(said), LONGEST_PAUSE_S)) if said and said.isdigit() else own
