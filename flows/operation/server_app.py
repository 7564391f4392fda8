"""Prefect's server as Sluice starts it: requests that write take turns, and one that SQLite refuses
is tried again.

SQLite refuses a transaction that has read and then writes while another has written since: another
request, or the server's own recorder of task runs. Prefect's server answers 503 to that, and its
client sleeps two seconds and more. Nothing of the request was done, so it runs again here, some
milliseconds later.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

from rlcore.collector import keep_loaded

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

UNAVAILABLE = 503
PATIENCE_S = 10.0
"""After which the client hears of it."""
PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1
READ = re.compile(r"/(filter|paginate|count[\w-]*|history|lateness)/?$")
"""Paths of requests that only read though they are a POST."""


def create_app() -> App:
    """The server's ASGI application, for uvicorn."""
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    app: App = create_app()
    keep_loaded()
    on_sqlite = str(PREFECT_API_DATABASE_CONNECTION_URL.value()).startswith("sqlite")
    return TriesAgain(app) if on_sqlite else app


class TriesAgain:
    """An ASGI application whose requests run again while they are answered 503; of those that write
    one at a time.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._writing = asyncio.Lock()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One connection: a request, a websocket or the server's lifetime."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages = await _read(receive)
        async with self._writing if _writes(scope) else nullcontext():
            await self._until_answered(scope, messages, receive, send)

    async def _until_answered(
        self,
        scope: MutableMapping[str, Any],
        messages: list[Message],
        receive: Receive,
        send: Send,
    ) -> None:
        deadline, pause = time.monotonic() + PATIENCE_S, PAUSE_S
        while time.monotonic() < deadline:
            attempt = _Attempt(messages, receive, send)
            try:
                await self._app(dict(scope), attempt.receive, attempt.send)
            except Exception:
                # The server answers first, and raises for the log then.
                if not attempt.refused:
                    raise
            if not attempt.refused:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        await self._app(scope, _Attempt(messages, receive, send).receive, send)


class _Attempt:
    """The request from its beginning, and an answer that is passed on unless it is 503."""

    def __init__(self, messages: list[Message], receive: Receive, send: Send) -> None:
        self.refused = False
        self._messages, self._receive, self._send = iter(messages), receive, send

    async def receive(self) -> Message:
        """The next part of the request; then whatever the client does."""
        found = next(self._messages, None)
        return await self._receive() if found is None else found

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        if message["type"] == "http.response.start":
            self.refused = message["status"] == UNAVAILABLE
        if not self.refused:
            await self._send(message)


def _writes(scope: MutableMapping[str, Any]) -> bool:
    return scope["method"] not in ("GET", "HEAD", "OPTIONS") and not READ.search(scope["path"])


async def _read(receive: Receive) -> list[Message]:
    """A request's body, in the messages it came in."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages
