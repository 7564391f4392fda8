"""Weights by handle: buckets that engines on the trainer's own GPUs read where they lie.

Each rank of the trainer flattens the same bucket on its GPU and makes a handle of it (CUDA IPC, by
torch's reductions); rank 0 gathers the handles and sends them. Rank r of all engines, counted
through, takes the handle of trainer rank r, which has the same GPU.

Invariants:
- A bucket stays where it is until every engine has answered: all ranks go from one to the next
  together, since the next is gathered only then.
- A bucket, its flattened copy and the tensor that comes then are all that is held.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from rlcore.errors import SyncError
from rlcore.rollout.client import EngineClient
from rlcore.weights.export import buckets_and_last
from rlcore.weights.transport import PARTIAL, Tensors, together

Handles = tuple[list[str], bool]
"""One of each trainer rank, and whether they are the last."""


class HandleTransport:
    """Handles within HTTP requests to SGLang servers.

    Args:
        version: of the weights.
        bucket_bytes: most bytes of a bucket.
        ranks_per_engine: tensor-parallel size of each.
    """

    def __init__(self, version: str, bucket_bytes: int, ranks_per_engine: int) -> None:
        self._version = version
        self._bucket_bytes = bucket_bytes
        self._each = ranks_per_engine

    def parts(self, tensors: Tensors) -> Iterator[Handles]:
        """The handles of one bucket after another; all ranks draw them."""
        flat = sglang_bucket()
        for bucket, last in buckets_and_last(tensors, self._bucket_bytes):
            made = flat(named_tensors=list(bucket.items()))
            bucket.clear()
            yield gathered(handle_of(made)), last
            # Held until the next is asked for: the engines have answered by then.
            del made

    def prepare(self, parts: Iterator[Handles]) -> dict[str, float]:
        """Nothing: buckets are made while they are sent."""
        return {}

    async def send(self, engines: Sequence[EngineClient], parts: Iterator[Handles]) -> None:
        """Bucket by bucket, each to all engines at once."""
        for handles, last in parts:
            if len(handles) < self._each * len(engines):
                raise SyncError(
                    f"{len(engines)} engines of {self._each} GPUs share those of "
                    f"{len(handles)} trainer ranks: weights.transport = 'tensor' needs a trainer "
                    "rank on each; use weights.transport = 'disk'"
                )
            version = self._version if last else self._version + PARTIAL
            await together(
                *(
                    engine.update_weights_from_tensor(
                        handles[k * self._each : (k + 1) * self._each],
                        version,
                        load_format="flattened_bucket",
                        flush_cache=False,
                    )
                    for k, engine in enumerate(engines)
                )
            )

    def confirmed(self) -> None:
        """Nothing is left behind."""


def handle_of(bucket: Any) -> str:
    """A flattened bucket as SGLang reads it: base64 of what it unpickles.

    Of tensors it holds handles: to GPU memory, or on the CPU to shared memory.
    """
    import torch.multiprocessing  # noqa: F401  # has tensors pickled as handles

    packed = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }
    return base64.b64encode(ForkingPickler.dumps(packed)).decode("ascii")


def gathered(handle: str) -> list[str]:
    """The handles of all ranks, on rank 0; nothing on others."""
    import torch.distributed as dist

    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(handle, found)
    return found or []


def sglang_bucket() -> Callable[..., Any]:
    """SGLang's own way to flatten: it differs between releases, as do the classes that are read.

    Raises:
        SyncError: SGLang is not installed where the trainer runs.
    """
    try:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        _name_gpus()
    except ImportError as error:
        raise SyncError(
            f"weights.transport = 'tensor' needs SGLang beside the trainer: {error}; install it "
            "there, or use weights.transport = 'disk'"
        ) from error
    found: Callable[..., Any] = FlattenedTensorBucket
    return found


def _name_gpus() -> None:
    """Have handles name their GPU by what it is: each process counts those that it sees."""
    try:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    except ImportError:
        from sglang.srt.patch_torch import monkey_patch_torch_reductions
    monkey_patch_torch_reductions()
