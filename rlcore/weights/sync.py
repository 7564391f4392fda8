"""New weights for all engines, in the one order that is safe, and the proof that they arrived.

    gather canary log-probs, prepare      engines still work
    pause -> flush -> send                on all engines at once
    every engine reports the version
    continue                              always, also after a failure
    canary on every engine          later, where an engine has no room to generate yet

With `pause_mode = "in_place"` nothing is ended and nothing flushed: requests wait, and go on with
the new weights.

The canary comes after `continue`, since a paused SGLang server holds `/generate` back until then. A
failed canary fails the stage all the same, and so ends the iteration.

Rank 0 of the trainer talks to the engines; gathering weights and the canary's log-probs need all
ranks.

Invariants:
- Whatever happens on rank 0, it takes part in every gather, so that no other rank is left waiting.
- After a failure no engine stays paused, unless it does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcore.config.weights import TransportName, WeightsConfig
from rlcore.errors import EngineError, PluginError, SluiceError, SyncError
from rlcore.plugins import load_checked
from rlcore.rollout.args import PluginArgs
from rlcore.rollout.client import EngineClient, adapter_of
from rlcore.store.objects import Objects
from rlcore.train.trainer import DType, Trainer
from rlcore.weights import canary
from rlcore.weights.delta.publisher import Publisher
from rlcore.weights.delta.transport import DeltaTransport
from rlcore.weights.distributed import DistributedTransport, Group, Members
from rlcore.weights.export import config_text
from rlcore.weights.fp8 import BlockFp8
from rlcore.weights.group import Backend
from rlcore.weights.handles import HandleTransport
from rlcore.weights.transport import (
    AdapterTransport,
    DiskTransport,
    TensorTransport,
    Transport,
    together,
)


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """One sync."""

    urls: tuple[str, ...]
    """The engines."""
    version: str
    """What they report afterwards."""
    transport: TransportName
    dtype: DType
    """In which the engines hold weights."""
    model_folder: Path
    """That engines started from: its config goes with the weights."""
    scratch: Path
    """For `disk`: a folder that the engines see; for `delta`: the trainer's own."""
    canary_prompts: int
    canary_tolerance: float
    vocab_size: int
    context_length: int
    """Of the engines."""
    fp8: bool = False
    """That folder is in fp8 blocks, and so are the weights to be."""
    starts: tuple[int, ...] = ()
    """How often each engine was started: one that was started again is in no group."""
    ranks_per_engine: int = 1
    """Its tensor-parallel size."""
    on_gpus: bool = False
    """The engines are SGLang servers on GPUs, and so is the trainer."""
    bucket_bytes: int = 512 * 2**20
    """Most bytes that travel at once."""
    as_adapter: bool = False
    """Engines hold the starting model and get the adapter that is trained."""
    pause_mode: Literal["abort", "in_place"] = "abort"
    """`in_place`: what is generated meanwhile stays, with its cache, and goes on with the new
    weights; tokens, and their log-probs, are of the policy that chose them.
    """
    timeout_s: float = 600.0
    """For each request."""
    canary_later: bool = False
    """The engines cannot generate yet: `WeightSync.canary` is called once they can."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """`args` of a function of one's own that is told of written folders."""
    run_id: str = ""
    """For `delta`: whose versions lie in the store."""
    mirrors: tuple[str, ...] = ()
    """For `delta`: the address of the mirror beside each engine."""

    @property
    def device(self) -> str:
        """Where weights have to lie to travel."""
        return "cuda" if self.on_gpus and self.transport not in ("disk", "delta") else "cpu"


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did; seconds by part and the largest canary difference of all engines.

    `seconds_paused` is from the pause to the continuation: flush (with the pause), send, resume
    (with the look at the version). `seconds_gather` is part of prepare or send: some transports
    gather while they send.
    """

    version: str
    metrics: dict[str, float]


class Timed:
    """An iterator that knows how long it was waited for."""

    def __init__(self, parts: Iterator[Any]) -> None:
        self._parts = parts
        self.seconds = 0.0

    def __iter__(self) -> Timed:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            return next(self._parts)
        finally:
            self.seconds += time.perf_counter() - start


class Laps:
    """Seconds of the parts of something, one after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """A part ends, and the next one begins."""
        now = time.perf_counter()
        self.seconds[name], self._since = now - self._since, now


class WeightSync:
    """One rank's end of all syncs of a run. Keeps its connections to the engines.

    Args:
        rank: of the trainer.
        address: of rank 0's machine, as the engines see it.
        objects: the store, for `delta`.
    """

    def __init__(
        self, rank: int, address: str = "127.0.0.1", objects: Objects | None = None
    ) -> None:
        self._rank = rank
        self._address = address
        self._objects = objects
        self._publisher: Publisher | None = None
        self._group = Group()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: dict[str, EngineClient] = {}
        self._ours: tuple[list[list[int]], list[list[float]]] = ([], [])
        """Canary sequences, and the trainer's log-probs of them."""

    def run(self, trainer: Trainer, spec: SyncSpec) -> SyncReport | None:
        """Push the trainer's weights. All ranks call it; rank 0 gets the report.

        Raises:
            EngineError: an engine does not answer or refuses.
            SyncError: an engine reports another version, or fails the canary.
        """
        start = time.perf_counter()
        sequences = canary.canary_sequences(
            spec.canary_prompts, spec.vocab_size, spec.context_length
        )
        self._ours = sequences, trainer.log_probs(sequences)
        transport = self._transport(spec, trainer)
        tensors = trainer.named_tensors(spec.dtype, spec.device)
        if spec.fp8:
            tensors = BlockFp8.of_folder(spec.model_folder).apply(tensors)
        parts = Timed(transport.parts(tensors))
        try:
            if self._rank != 0:
                return None
            figures = transport.prepare(parts)
            prepared = time.perf_counter()
            metrics = self._run(self._push(spec, transport, parts)) | figures
        finally:
            for _ in parts:
                pass
        metrics["seconds_gather"] = parts.seconds
        metrics["seconds_prepare"] = prepared - start
        metrics["seconds"] = time.perf_counter() - start
        return SyncReport(spec.version, metrics)

    def canary(self, spec: SyncSpec) -> dict[str, float]:
        """Have the engines prove that they hold what `run` pushed; rank 0 calls it.

        Raises:
            SyncError: one does not.
        """
        return self._run(self._prove(spec))

    def close(self) -> None:
        """Drop the connections."""
        self._group.close()
        if self._loop is not None:
            self._run(together(*(client.close() for client in self._clients.values())))
            self._loop.close()
        self._loop, self._clients = None, {}

    async def _push(
        self,
        spec: SyncSpec,
        transport: Transport,
        parts: Iterator[Any],
    ) -> dict[str, float]:
        """Everything that needs the engines."""
        engines, laps = self._engines(spec), Laps()
        try:
            await together(*(e.pause(spec.pause_mode) for e in engines))
            if spec.pause_mode == "abort":
                await together(*(e.flush_cache() for e in engines))
            laps.end("seconds_flush")
            await transport.send(engines, parts)
            laps.end("seconds_send")
            await together(*(_check_version(e, spec.version) for e in engines))
        except BaseException:
            # The first error is the one to tell; an engine that cannot go on is found by its own.
            with contextlib.suppress(EngineError):
                # Nothing goes on with weights of which some are old. What is paused in place ends
                # once it goes on: SGLang's pause would wait for it, and the resumption for that.
                in_place = spec.pause_mode == "in_place"
                await together(*(e.abort() if in_place else e.pause("abort") for e in engines))
            with contextlib.suppress(EngineError):
                await together(*(e.resume() for e in engines))
            raise
        await together(*(e.resume() for e in engines))
        laps.end("seconds_resume")
        paused = sum(laps.seconds.values())
        transport.confirmed()
        metrics = {"seconds_paused": paused, **laps.seconds}
        return metrics if spec.canary_later else metrics | await self._prove(spec)

    async def _prove(self, spec: SyncSpec) -> dict[str, float]:
        """The largest difference of any engine's log-probs to the trainer's."""
        engines, laps = self._engines(spec), Laps()
        sequences, ours = self._ours
        adapter = adapter_of(spec.version) if spec.as_adapter else None
        theirs = await together(*(e.prompt_log_probs(sequences, adapter) for e in engines))
        gaps = [
            canary.check(engine.url, ours, answer, spec.canary_tolerance)
            for engine, answer in zip(engines, theirs, strict=True)
        ]
        laps.end("seconds_canary")
        return {"canary_abs_diff": max(gaps), **laps.seconds}

    def _transport(self, spec: SyncSpec, trainer: Trainer) -> Transport:
        if spec.as_adapter:
            return AdapterTransport(spec.scratch, spec.version, trainer.adapter())
        if spec.transport == "disk":
            return DiskTransport(
                spec.scratch,
                spec.model_folder,
                spec.version,
                spec.dtype,
                flush_cache=spec.pause_mode == "abort",
                written=_own_hook(spec),
            )
        if spec.transport == "delta":
            return DeltaTransport(
                self._publishing(spec),
                spec.mirrors,
                spec.version,
                config_text(spec.model_folder, spec.dtype),
                flush_cache=spec.pause_mode == "abort",
                timeout_s=spec.timeout_s,
            )
        each = spec.ranks_per_engine
        if spec.transport == "tensor" and spec.on_gpus:
            return HandleTransport(spec.version, spec.bucket_bytes, each)
        if spec.transport == "tensor":
            return TensorTransport(spec.version, spec.bucket_bytes)
        backend: Backend = "nccl" if spec.on_gpus else "gloo"
        members = Members(spec.urls, spec.starts, each, backend, self._address)
        return DistributedTransport(self._group, members, spec.version, spec.bucket_bytes)

    def _publishing(self, spec: SyncSpec) -> Publisher:
        """The one publisher of all syncs: it knows what the engines hold."""
        if self._publisher is None:
            assert self._objects is not None
            self._publisher = Publisher(
                self._objects,
                spec.run_id,
                spec.scratch / "published",
                base_interval=spec.weights.delta_base_interval,
                part_bytes=spec.bucket_bytes,
            )
        return self._publisher

    def _engines(self, spec: SyncSpec) -> list[EngineClient]:
        if not spec.urls:
            raise SyncError("there are no engines to send the weights to")
        for url in spec.urls:
            if url not in self._clients:
                self._clients[url] = EngineClient(url, timeout_s=spec.timeout_s)
        return [self._clients[url] for url in spec.urls]

    def _run(self, work: object) -> dict[str, float]:
        # One loop for all syncs: a client and its open connections belong to the loop they began
        # in.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(work)  # type: ignore[arg-type]


async def _check_version(engine: EngineClient, version: str) -> None:
    got = await engine.weight_version()
    if got != version:
        raise SyncError(
            f"engine {engine.url} reports weight version {got!r} after an update to {version!r}"
        )


def _own_hook(spec: SyncSpec) -> Callable[[Path], None] | None:
    """The function of one's own that is told of a written folder, if there is one."""
    path = spec.weights.custom_update_weight_post_write_path
    if path is None:
        return None
    setting = "weights.custom_update_weight_post_write_path"
    function = load_checked(path, setting, "post_write")

    def told(folder: Path) -> None:
        try:
            function(PluginArgs(spec.weights.model_dump()), str(folder), list(spec.urls))
        except SluiceError:
            raise
        except Exception as error:
            # A custom function may raise anything; the engines were not told of the folder yet.
            raise PluginError(
                f"{setting} = {path!r} raised {type(error).__name__}: {error}"
            ) from error

    return told
