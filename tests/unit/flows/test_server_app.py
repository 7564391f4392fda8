"""Requests that a server answers 503 run again there, and nothing else does."""

import asyncio
from typing import Any

import httpx
import pytest

from flows.operation import server_app
from flows.operation.server_app import TriesAgain


class Recorded:
    """An application that answers as it is told, and then with what it was sent."""

    def __init__(self, *answers: int | Exception, raises_after: bool = False) -> None:
        self._answers, self._raises_after = list(answers), raises_after
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        self.bodies.append(body)
        scope["path"] = "changed"
        answer = self._answers.pop(0) if self._answers else 200
        if isinstance(answer, Exception):
            raise answer
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": answer, "headers": headers})
        await send({"type": "http.response.body", "body": b"%d " % answer, "more_body": True})
        await send({"type": "http.response.body", "body": body})
        if answer == 503 and self._raises_after:
            raise RuntimeError("for the log")


def post(app: Any, content: Any = b"body") -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/api", content=content)

    return asyncio.run(ask())


@pytest.mark.parametrize("raises_after", [False, True])
def test_a_refused_request_runs_again_with_its_body(raises_after: bool) -> None:
    app = Recorded(503, 503, 201, raises_after=raises_after)
    answer = post(TriesAgain(app))
    assert (answer.status_code, answer.text) == (201, "201 body")
    assert app.bodies == [b"body"] * 3


def test_a_body_in_parts() -> None:
    async def parts() -> Any:
        for part in (b"one ", b"two ", b"three"):
            yield part

    app = Recorded(503)
    assert post(TriesAgain(app), parts()).text == "200 one two three"
    assert app.bodies == [b"one two three"] * 2


@pytest.mark.parametrize("status", [200, 404, 409, 422, 500])
def test_other_answers_pass(status: int) -> None:
    app = Recorded(status)
    assert post(TriesAgain(app)).status_code == status
    assert len(app.bodies) == 1


def test_errors_pass() -> None:
    with pytest.raises(ValueError, match="broken"):
        post(TriesAgain(Recorded(ValueError("broken"))))


def test_who_is_refused_for_long_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "PATIENCE_S", 0.3)
    app = Recorded(*[503] * 1000)
    assert post(TriesAgain(app)).status_code == 503
    assert 3 < len(app.bodies) < 60


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [
        ("POST", "/api/task_runs/", 1),
        ("PATCH", "/api/flow_runs/1", 1),
        ("DELETE", "/api/flow_runs/1", 1),
        ("POST", "/api/flow_runs/filter", 4),
        ("POST", "/api/ui/task_runs/count-by-state", 4),
        ("GET", "/api/flow_runs/1", 4),
    ],
)
def test_those_that_write_take_turns(method: str, path: str, most: int) -> None:
    under_way, seen = 0, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal under_way
        under_way += 1
        seen.append(under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        transport = httpx.ASGITransport(TriesAgain(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await asyncio.gather(*(client.request(method, path) for _ in range(4)))

    asyncio.run(ask())
    assert max(seen) == most and len(seen) == 4


def test_what_is_no_request_passes_untouched() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    given: Any = ({"type": "lifespan"}, "receive", "send")
    asyncio.run(TriesAgain(app)(*given))
    assert seen == [given]
