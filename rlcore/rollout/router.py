"""sglang-router between the rollout worker and its engines: requests to generate go to its address,
and it chooses the engine. All else is said to each engine itself.

What it passes on is one prompt a request: it knows no lists of sampling parameters.

Invariants:
- A router that was started here knows the run's engines and no others, and ends with this process.
- At one that runs already the run's engines are announced, and taken off the list at the end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import httpx

from rlcore.engine.launch import EngineProcess
from rlcore.errors import ConfigError, EngineError
from rlcore.net import free_port
from rlcore.rollout.client import EngineClient, GenerateRequest, GenerateResult
from rlcore.rollout.limits import Limits
from rlcore.rollout.together import all_of

log = logging.getLogger("sluice.rollout")

PACKAGE = "sglang_router"
START_S = 60.0
ANSWER_S = 10.0


class Router:
    """The router of a run. `open` it with the engines, `close` it at the end.

    Args:
        url: of one that runs already; None: it is started here.
        log_path: of one that is started here.
        request_timeout_s: seconds that it gives an engine for an answer.
    """

    def __init__(self, url: str | None, log_path: Path, request_timeout_s: float) -> None:
        self._log_path = log_path
        self._timeout_s = request_timeout_s
        self._engines: list[str] = []
        self._port = 0 if url else free_port()
        self._process = None if url else EngineProcess(self._port)
        self.url = (url or f"http://127.0.0.1:{self._port}").rstrip("/")

    async def open(self, engines: Sequence[str]) -> None:
        """Have it spread requests over these engines.

        Raises:
            ConfigError: the package is not installed.
            EngineError: it does not come up, or does not take them.
        """
        self._engines = list(engines)
        if self._process is not None:
            await asyncio.to_thread(self._start, self._process)
            return
        for engine in engines:
            await self._tell("POST", "/workers", {"url": engine, "worker_type": "regular"})

    async def revive(self) -> None:
        """Start it again if it was started here and has ended.

        Raises:
            EngineError: it does not come up.
        """
        if self._process is not None and not self._process.alive():
            await asyncio.to_thread(self._start, self._process)

    async def close(self) -> None:
        """End it, or take the engines off its list."""
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
            return
        for engine in self._engines:
            try:
                await self._tell("DELETE", f"/workers/{quote(engine, safe='')}", None)
            except EngineError as error:
                # What is over must not fail by it.
                log.warning("%s", error)

    def _start(self, process: EngineProcess) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(
                f"rollout.use_sglang_router = true needs the package {PACKAGE}; install "
                "sglang-router, or leave the setting out: requests then go to the least loaded "
                "engine"
            )
        process.start(router_argv(self._port, self._engines, self._timeout_s), self._log_path)
        process.wait_healthy(START_S)

    async def _tell(self, method: str, path: str, body: dict[str, str] | None) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
            try:
                reply = await http.request(method, f"{self.url}{path}", json=body)
            except httpx.HTTPError as error:
                raise EngineError(
                    f"rollout.sglang_router_url: {self.url} does not answer: {error!r}"
                ) from error
        # It may have been told before, by a worker that died.
        if not reply.is_success and reply.status_code != httpx.codes.CONFLICT:
            raise EngineError(
                f"rollout.sglang_router_url: {self.url}{path} answered {reply.status_code}: "
                f"{reply.text[:200]}"
            )


class RoutedClient(EngineClient):
    """Generates through a router."""

    def __init__(self, router: Router, limits: Limits | None, timeout_s: float) -> None:
        super().__init__(router.url, limits, timeout_s)
        self.router = router

    async def generate(
        self, requests: Sequence[GenerateRequest], adapter: str | None = None
    ) -> list[GenerateResult]:
        """As `EngineClient.generate`, by an HTTP request for each."""
        return await all_of(self._generate_alone(one, adapter) for one in requests)


def router_argv(port: int, engines: Sequence[str], request_timeout_s: float) -> list[str]:
    """`python -m sglang_router.launch_router ...`: failures are for the run to deal with."""
    argv = [sys.executable, "-P", "-m", f"{PACKAGE}.launch_router"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines]
    argv += ["--request-timeout-secs", str(max(1, round(request_timeout_s)))]
    return [*argv, "--disable-retries", "--disable-circuit-breaker"]
