"""A sync through the store: publish, have every mirror build the folder, have engines load it.

All of that but the loading is done while the engines still work.

Invariant: a mirror that cannot build the version, since something in the store is damaged or gone,
gets it once more in full; only then does the sync fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from rlcore.errors import Corrupt, SyncError
from rlcore.rollout.client import EngineClient
from rlcore.store.deltas import IndexRef
from rlcore.weights.delta.publisher import Publisher
from rlcore.weights.transport import Tensors, load_folders

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("sluice.weights")


class DeltaTransport:
    """See `Transport`."""

    def __init__(
        self,
        publisher: Publisher,
        mirrors: Sequence[str],
        version: str,
        config: str,
        *,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """
        Args:
            publisher: of the run; it lasts from sync to sync.
            mirrors: the address of each engine's, in the engines' order.
            version: that the engines will report.
            config: the model's config.json.
            flush_cache: whether engines forget what they have cached.
            timeout_s: for each request.
        """
        self._publisher = publisher
        self._mirrors = mirrors
        self._version = version
        self._config = config
        self._flush_cache = flush_cache
        self._timeout_s = timeout_s
        self._folders: list[str] = []

    def parts(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        """The tensors as they are."""
        return tensors

    def prepare(self, parts: Tensors) -> dict[str, float]:
        """Publish what changed and have the folders made."""
        ref = self._publisher.publish(self._version, self._config, parts)
        figures = self._publisher.figures
        try:
            self._folders = self._pulled(ref)
        except Corrupt as error:
            log.warning("%s; the weights are published whole", error)
            self._folders = self._pulled(self._publisher.publish_whole())
            figures = self._publisher.figures
        return figures

    async def send(self, engines: Sequence[EngineClient], parts: Tensors) -> None:
        """Have each engine load the folder beside it."""
        await load_folders(engines, self._folders, self._version, flush_cache=self._flush_cache)

    def confirmed(self) -> None:
        """Remove what no version builds on any more."""
        self._publisher.confirmed()

    def _pulled(self, ref: IndexRef) -> list[str]:
        """The folder that each mirror has made of a version."""
        with ThreadPoolExecutor(len(self._mirrors)) as pool:
            return list(pool.map(lambda url: self._pull(url, ref), self._mirrors))

    def _pull(self, url: str, ref: IndexRef) -> str:
        try:
            answer = httpx.post(
                f"{url}/pull",
                content=ref.model_dump_json(),
                timeout=self._timeout_s,
                trust_env=False,
            )
            told = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise SyncError(f"the mirror of weights at {url} does not answer: {error}") from error
        if answer.status_code != 200:
            raise Corrupt(f"the mirror of weights at {url}: {told.get('error', told)}")
        return str(told["folder"])
