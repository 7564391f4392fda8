"""The Ray actor that watches an engine which somebody else started (`rollout.engine_urls`).

It has the methods of `EngineActor`, but starts and ends nothing: to start means to wait until the
engine answers, and one that went down is waited for until it is back.
"""

import json
import logging
import time
import urllib.error
import urllib.request
from typing import Any

from rlcore.cluster.actor_logs import Line, Lines
from rlcore.cluster.engine_actor import EngineSpec, Part
from rlcore.engine.launch import POLL_SECONDS, answers, open_directly, watched_path
from rlcore.errors import EngineError

log = logging.getLogger("sluice.engine")


class ExternalEngine:
    """Watches engine number `rank` of a run."""

    def __init__(self, spec: EngineSpec, rank: int) -> None:
        self._lines = Lines()
        self._spec = spec
        self._url = spec.urls[rank]
        self._version = ""

    def start(self, weight_version: str, port: int | None, part: Part | None) -> str:
        """Wait until the engine answers. What weights it has is not asked: it is given the run's.

        Raises:
            EngineError: it did not answer in time, or has another number of GPUs.
        """
        deadline = time.monotonic() + self._spec.start_timeout_s
        while not answers(self._url, self._spec.check_timeout_s):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine at {self._url} (rollout.engine_urls) did not answer /health "
                    f"within {self._spec.start_timeout_s:g} s"
                )
            time.sleep(POLL_SECONDS)
        info = self._ask("/get_server_info")
        gpus = int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
        if gpus != self._spec.gpus:
            raise EngineError(
                f"the engine at {self._url} (rollout.engine_urls) has {gpus} GPUs (tp_size x "
                f"pp_size), but cluster.rollout_num_gpus_per_engine = {self._spec.gpus}"
            )
        self._version = self._weight_version()
        log.info("%s engine at %s, not started by this run", self._spec.engine, self._url)
        return self._url

    def lines(self) -> list[Line]:
        """What was logged since the last call."""
        return self._lines.take()

    def probe(self, timeout_s: float, ask: bool = True) -> str | None:
        """What is wrong with the engine; None if it answers and was not started anew."""
        if not ask:
            return None
        path = watched_path(self._spec.engine)
        if not answers(self._url, timeout_s, path):
            return f"it did not answer {path} within {timeout_s:g} s"
        try:
            before, self._version = self._version, self._weight_version()
        except EngineError as error:
            return str(error)
        if _number(self._version) < _number(before):
            return f"it has weight version {self._version!r} after {before!r}: it was started anew"
        return None

    def stop(self, patience_s: float = 10.0) -> None:
        """Leave the engine as it is."""

    def _weight_version(self) -> str:
        return str(self._ask("/get_model_info").get("weight_version", ""))

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            with open_directly(self._url + path, self._spec.check_timeout_s) as response:
                return dict(json.load(response))
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise EngineError(f"the engine at {self._url} did not answer {path}: {error}") from None


def _number(version: str) -> int:
    """Versions that a run gives are numbers; a server's own comes before them."""
    return int(version) if version.isdecimal() else -1
