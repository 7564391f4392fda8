"""All ranks of the trainer, seen from the driver: each method is one call on every rank.

Importing this module imports neither torch nor Ray.

Invariants:
- The first error of any rank is the one that is raised; one that died comes before all others.
- When one rank fails, the others may wait for it in a collective for ever: those that have not come
  back after `GRACE_S` seconds are ended with it, and the group is `broken`; start a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from rlcore.cluster.actor_logs import Relay
from rlcore.cluster.ray_session import call
from rlcore.cluster.trainer_actor import SavedState, TrainerActor, TrainerSpec
from rlcore.errors import ClusterError, SluiceError, TrainError
from rlcore.train.trainer import DType, TrainReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlcore.cluster.placement import Place
    from rlcore.config.tree import ModelConfig
    from rlcore.store.manifest import FileRef
    from rlcore.train.trainer import BatchFiles
    from rlcore.weights.sync import SyncReport, SyncSpec

GRACE_S = 15.0


class TrainerGroup:
    """The ranks' actors; made by `start`."""

    def __init__(self, actors: list[Any], epoch: int, deadline_s: float) -> None:
        self._actors = actors
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._relay = Relay()
        self.broken = False

    @classmethod
    async def start(
        cls,
        spec: TrainerSpec,
        *,
        places: Sequence[Place],
        epoch: int,
        name: str,
        namespace: str,
        deadline_s: float = 3600.0,
    ) -> TrainerGroup:
        """Create the actors and let them find each other. No model is loaded yet.

        Args:
            spec: what each rank is made of.
            places: where each rank is put.
            epoch: the driver's lease epoch, sent with every call.
            name, namespace: rank r is the named actor `{name}-{r}`.
            deadline_s: seconds that any call may take.

        Raises:
            ClusterError: a rank did not come up.
        """
        import ray

        remote = ray.remote(TrainerActor)
        actors: list[Any] = [
            remote.options(
                name=f"{name}-{rank}",
                namespace=namespace,
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                **place.options,
            ).remote(spec, rank, len(places))
            for rank, place in enumerate(places)
        ]
        group = cls(actors, epoch, deadline_s)
        try:
            address, port = await call(
                actors[0].rendezvous.remote(), deadline_s=deadline_s, what="trainer rank 0"
            )
            await group._all("init_process_group", epoch, address, port)
        except BaseException:
            group.kill()
            raise
        return group

    # --- state ------------------------------------------------------------------------------------

    async def prepare_model(self, run_id: str, model: ModelConfig) -> None:
        """Have the starting model in its folder; the first rank builds it where that is asked
        for.
        """
        remote = self._actors[0].prepare_model.remote(self._epoch, run_id, model)
        await call(remote, deadline_s=self._deadline_s, what="trainer rank 0 (prepare_model)")

    async def load(self, state_id: str) -> None:
        """Load the starting model."""
        await self._all("load", self._epoch, state_id)

    async def restore(self, saved: SavedState, state_id: str) -> None:
        """Load a saved state."""
        await self._all("restore", self._epoch, saved, state_id)

    async def holds(self, state_id: str) -> bool:
        """Whether every rank holds that state, untouched since."""
        return all(state == (state_id, False) for state in await self._all("state"))

    async def save_state(self, key_prefix: str) -> SavedState:
        """Store the state that is held below a folder of the store."""
        parts: list[SavedState] = await self._all("save_state", self._epoch, key_prefix)
        files = tuple(ref for part in parts for ref in part.files)
        return SavedState(key_prefix, files, parts[0].model_sha256, parts[0].optimizer_sha256)

    # --- work -------------------------------------------------------------------------------------

    def read_ahead(self, rollout: tuple[FileRef, ...]) -> None:
        """Have every rank read a committed rollout. Does not wait; a failure shows in `train`."""
        if not self.broken:
            for actor in self._actors:
                actor.read_ahead.remote(self._epoch, rollout)

    async def train(
        self, prev: str, new: str, files: BatchFiles, max_tokens: int | None = None
    ) -> TrainReport:
        """Train a committed batch: from state `prev`, which must be held, to state `new`."""
        reports: list[TrainReport] = await self._all(
            "train", self._epoch, prev, new, files, max_tokens
        )
        return reports[0]

    async def log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, at temperature 1."""
        answers: list[list[list[float]]] = await self._all("log_probs", self._epoch, sequences)
        return answers[0]

    async def export_hf(self, key_prefix: str, dtype: DType) -> list[FileRef]:
        """Store the weights as a Hugging Face folder."""
        parts: list[list[FileRef]] = await self._all("export_hf", self._epoch, key_prefix, dtype)
        return parts[0]

    async def sync(self, spec: SyncSpec) -> SyncReport:
        """Push the weights to the engines, and prove that they arrived."""
        reports: list[SyncReport] = await self._all("sync", self._epoch, spec)
        return reports[0]

    async def canary(self, spec: SyncSpec) -> dict[str, float]:
        """After a sync that left it for later: prove that the weights arrived."""
        answers: list[dict[str, float]] = await self._all("canary", self._epoch, spec)
        return answers[0]

    async def offload(self) -> dict[str, float]:
        """Free the ranks' devices; what was held and is free, of the rank with most or least."""
        return _extremes(await self._all("offload", self._epoch))

    async def onload(self, *, weights_only: bool) -> dict[str, float]:
        """Take the ranks' devices again; what was free, of the rank with least."""
        return _extremes(await self._all("onload", self._epoch, weights_only))

    async def memory(self) -> list[dict[str, float]]:
        """Bytes held by each rank, by kind."""
        return await self._all("memory")

    async def ping(self) -> list[int]:
        """Process id of each rank."""
        return await self._all("ping")

    # --- end --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End all ranks in good order."""
        if not self.broken:
            with contextlib.suppress(ClusterError):
                await self._all("shutdown")
        self.kill()

    def kill(self) -> None:
        """End all ranks at once."""
        import ray

        self.broken = True
        for actor in self._actors:
            ray.kill(actor)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call every rank; the answers in order of rank.

        Raises:
            SluiceError: the first that a rank raised; a `TrainError` for any other exception.
            ClusterError: a rank died or did not answer in time, or the group is broken.
        """
        if self.broken:
            raise ClusterError("the trainer's ranks were ended after a failure; start them again")
        calls = [
            asyncio.ensure_future(
                call(
                    getattr(actor, method).remote(*args),
                    deadline_s=self._deadline_s,
                    what=f"trainer rank {rank} ({method})",
                )
            )
            for rank, actor in enumerate(self._actors)
        ]
        _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        for rank, actor in enumerate(self._actors):
            self._relay.fetch(actor, f"trainer rank {rank}")
        first = [c for c in calls if c.done() and c.exception() is not None]
        if not first:
            return [c.result() for c in calls]
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=GRACE_S)
        # A rank that died matters more than what the others say of the connection that broke.
        died = [c for c in calls if c.done() and isinstance(c.exception(), ClusterError)]
        if waiting or died:
            for late in waiting:
                late.cancel()
            self.kill()
        culprit = (died or first)[0]
        error = culprit.exception()
        if isinstance(error, SluiceError):
            raise error
        raise TrainError(f"trainer rank {calls.index(culprit)} ({method}): {error}") from error


def _extremes(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Of figures of all ranks: the least of what is free, the most of what is held."""
    return {
        name: (min if name.startswith("free") else max)(rank[name] for rank in ranks)
        for name in ranks[0]
    }
