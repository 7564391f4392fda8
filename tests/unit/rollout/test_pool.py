"""Several engines: even shares, retries elsewhere, health, bounded concurrency, order."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import Request, Response

from rlcore.errors import EngineError
from rlcore.rollout.client import GenerateRequest
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool

LIMITS = Limits(128, 64)
MakePool = Callable[..., EnginePool]


def requests(n: int) -> list[GenerateRequest]:
    return [
        GenerateRequest([k % 100, 1], {"max_new_tokens": 3, "sampling_seed": k}) for k in range(n)
    ]


def calls(server: Any) -> list[int]:
    """Requests in each /generate call that a server got."""
    return [len(body["input_ids"]) for path, body in server.seen if path == "/generate"]


@pytest.fixture
async def pools() -> AsyncIterator[MakePool]:
    made: list[EnginePool] = []

    def make(servers: list[Any], **settings: Any) -> EnginePool:
        urls = [s if isinstance(s, str) else s.url for s in servers]
        made.append(EnginePool(urls, LIMITS, **{"pause_s": 0.01, "timeout_s": 5.0} | settings))
        return made[-1]

    yield make
    for pool in made:
        await pool.close()


@pytest.fixture
def dead_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


async def test_one_call_an_engine_in_even_shares_of_whole_groups(
    servers: list[Any], pools: MakePool
) -> None:
    found = await pools(servers).generate(requests(48), group=8)
    assert [calls(s) for s in servers] == [[24], [24]]
    expected = [servers[0].one(r.input_ids, r.sampling_params)["output_ids"] for r in requests(48)]
    assert [r.tokens for r in found] == expected
    for server in servers:
        server.seen.clear()
    await pools(servers).generate(requests(40), group=8)
    assert sorted(calls(s) for s in servers) == [[16], [24]]


async def test_more_than_an_engine_holds_goes_in_smaller_calls_that_refill_it(
    servers: list[Any], pools: MakePool
) -> None:
    flying = dict.fromkeys((s.url for s in servers), 0)
    highest = 0

    async def watch(server: Any, request: Request) -> Any:
        nonlocal highest
        n = len(json.loads(await request.body())["input_ids"])
        flying[server.url] += n
        highest = max(highest, flying[server.url])
        reply = await server._generate(request)
        flying[server.url] -= n
        return reply

    for server in servers:
        server.answer = lambda request, server=server: watch(server, request)
    found = await pools(servers, concurrency=64).generate(requests(500), group=4)
    assert len(found) == 500
    assert highest <= 64
    assert {n for s in servers for n in calls(s)} <= {8, 4}
    assert all(100 < sum(calls(s)) < 400 for s in servers)


async def test_a_failed_call_goes_to_another_engine(
    servers: list[Any], pools: MakePool, dead_url: str
) -> None:
    found = await pools([dead_url, servers[0]]).generate(requests(20))
    expected = [servers[0].one(r.input_ids, r.sampling_params)["output_ids"] for r in requests(20)]
    assert [r.tokens for r in found] == expected


async def test_an_engine_that_fails_is_left_alone_until_it_is_healthy(
    servers: list[Any], pools: MakePool
) -> None:
    good, bad = servers
    pool = pools(servers)
    bad.says("overloaded", 503)
    for _ in range(3):
        await pool.generate(requests(4))
    assert len(calls(bad)) == 2
    bad.reset()
    await asyncio.sleep(1.05)
    await pool.generate(requests(4))
    assert [path for path, _ in bad.seen] == ["/health", "/generate"]
    assert calls(good)


async def test_the_last_error_is_told_when_all_attempts_fail(
    server: Any, pools: MakePool, dead_url: str
) -> None:
    server.says("out of memory", 500)
    with pytest.raises(EngineError) as caught:
        await pools([server], retries=1).generate(requests(2))
    for part in ("2 requests failed 2 times", "rollout.request_retries = 1", "500: out of memory"):
        assert part in str(caught.value)
    with pytest.raises(EngineError, match=r"no engine answers|did not answer"):
        await pools([dead_url], retries=3).generate(requests(2))


async def test_a_refused_request_is_not_sent_again(server: Any, pools: MakePool) -> None:
    server.says({"error": {"message": "bad stop"}}, 400)
    with pytest.raises(EngineError, match="answered 400: bad stop"):
        await pools([server]).generate(requests(2))
    assert len(calls(server)) == 1


async def test_a_dropped_connection_and_a_slow_answer_are_retried(
    server: Any, pools: MakePool
) -> None:
    async def faulty(request: Request) -> Any:
        if len(calls(server)) == 1:
            await asyncio.sleep(3)
        if len(calls(server)) == 2:
            return Response('[{"cut', status_code=200)
        return await server._generate(request)

    server.answer = faulty
    found = await pools([server], timeout_s=0.5).generate(requests(3))
    assert [len(r.tokens) for r in found] == [3, 3, 3]
    assert len(calls(server)) == 3


async def test_only_what_an_engine_aborted_is_sent_again(server: Any, pools: MakePool) -> None:
    async def abort_some(request: Request) -> Any:
        body = json.loads(await request.body())
        first = len(calls(server)) == 1
        pairs = zip(body["input_ids"], body["sampling_params"], strict=True)
        return [
            server.one(ids, p, "abort" if first and p["sampling_seed"] % 2 else "stop")
            for ids, p in pairs
        ]

    server.answer = abort_some
    found = await pools([server]).generate(requests(10))
    assert calls(server) == [10, 5]
    assert {r.finish_reason for r in found} == {"stop"}
    assert [r.tokens[0] for r in found] == [
        server.one(r.input_ids, r.sampling_params)["output_ids"][0] for r in requests(10)
    ]


async def test_an_engine_that_always_aborts_is_an_error(server: Any, pools: MakePool) -> None:
    async def abort(request: Request) -> Any:
        body = json.loads(await request.body())
        return [server.one(ids, {"max_new_tokens": 0}, "abort") for ids in body["input_ids"]]

    server.answer = abort
    with pytest.raises(EngineError, match="aborted 3 requests"):
        await pools([server], retries=1).generate(requests(3))


async def test_one_failure_ends_the_other_calls(servers: list[Any], pools: MakePool) -> None:
    async def slow(request: Request) -> Any:
        await asyncio.sleep(3)

    servers[0].answer = slow
    servers[1].says({"message": "no"}, 400)
    began = time.monotonic()
    with pytest.raises(EngineError, match="answered 400: no"):
        await pools(servers).generate(requests(4))
    assert time.monotonic() - began < 2


async def test_nothing_to_do_and_nobody_to_do_it(server: Any, pools: MakePool) -> None:
    assert await pools([server]).generate([]) == []
    with pytest.raises(EngineError, match="no engine"):
        EnginePool([], LIMITS)


async def test_an_engine_with_other_weights_is_left_alone_until_it_holds_the_right_ones(
    servers: list[Any], pools: MakePool
) -> None:
    current, restarted = servers
    pool = pools(servers)
    pool.version = current.version = "7"
    restarted.version = "0"
    for _ in range(2):
        found = await pool.generate(requests(20))
        assert {r.weight_version for r in found} == {"7"}
    assert len(calls(restarted)) == 1
    restarted.version = "7"
    await asyncio.sleep(1.05)
    await pool.generate(requests(20))
    restarted.seen.clear()
    await pool.generate(requests(20))
    assert calls(restarted) == [10]


async def test_calls_wait_for_an_engine_to_come_back(server: Any, pools: MakePool) -> None:
    pool = pools([server], retries=2, patience_s=30.0)
    server.says("going down", 503)
    waiting = asyncio.ensure_future(pool.generate(requests(4)))
    # More seconds than the two retries take.
    await asyncio.sleep(3)
    assert not waiting.done()
    server.reset()
    assert len(await waiting) == 4


async def test_nobody_waits_longer_than_told(dead_url: str, pools: MakePool) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match="no engine answers"):
        await pools([dead_url], retries=2, patience_s=2.0).generate(requests(4))
    assert time.monotonic() - began < 8


async def test_long_responses_travel_in_small_calls_of_whole_groups(
    server: Any, pools: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.rollout.pool.CALL_TOKENS", 30)
    pool = pools([server])
    await pool.generate(requests(24), group=4)
    assert sorted(calls(server)) == [8, 8, 8]
    server.seen.clear()
    await pool.generate(requests(24), group=12)
    assert sorted(calls(server)) == [12, 12]


async def test_policies_may_change_while_requests_are_in_flight(
    server: Any, pools: MakePool
) -> None:
    pool = pools([server], retries=0)
    pool.version, pool.oldest = "2", 1
    for version, named in (("2", ["2"]), ("3", ["2", "3"]), ("1", ["2", "1"])):
        server.version = version
        [result] = await pool.generate(requests(1))
        # An engine that names the last policy alone: the one that was known of may be the first.
        assert result.weight_versions == named
    for version in ("0", "3-partial"):
        server.version = version
        pool = pools([server], retries=0)
        pool.version, pool.oldest = "2", 1
        with pytest.raises(EngineError, match=f"policy version '{version}', not '2'"):
            await pool.generate(requests(1))
