"""The Ray actor that holds one rank of the trainer: torch.distributed, the store, and fencing
around a `Trainer`.

Made through `ray.remote` by `trainer_group`. Calls come one at a time, the same on every rank.

Invariants:
- Every call carries the driver's lease epoch; one lower than the highest seen raises `Fenced`.
- State goes straight into the store where that is a local disk, else through the scratch folder.
- A restored state is believed when the digests of what was loaded are those of the manifest.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cluster.actor_logs import Line, Lines, shown
from rlcore.collector import keep_loaded
from rlcore.config.tree import AlgorithmConfig, MegatronTable, ModelConfig, Scalar, TrainConfig
from rlcore.errors import Corrupt, Fenced, TrainError
from rlcore.images.processor import takes_images
from rlcore.net import interface_of, own_address, share_as_sglang
from rlcore.slime.compat import state as slime
from rlcore.starting_model import prepare_model
from rlcore.store.files import download_folder, file_ref, upload_file, upload_folder
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects
from rlcore.train.determinism import make_deterministic
from rlcore.train.make import make_trainer
from rlcore.train.trainer import DType, Lora, StateDigest, TrainReport
from rlcore.weights.sync import SyncReport, SyncSpec, WeightSync

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from rlcore.train.trainer import BatchFiles, Trainer

log = logging.getLogger("sluice.trainer")

GB = 1e9


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What the ranks of a trainer are made of."""

    train: TrainConfig
    algorithm: AlgorithmConfig
    temperature: float
    """Of the rollout."""
    seed: int
    device: str
    """`cpu` or `cuda`."""
    model_folder: str
    """Hugging Face folder of the starting model."""
    storage_root: str
    storage_options: dict[str, Scalar] = field(repr=False)
    scratch: str
    """Local folder for what is on its way to or from the store."""
    trust_remote_code: bool = False
    lora: Lora | None = None
    as_sglang: bool = False
    """Compute what SGLang does, operation by operation."""
    timeout_s: float = 3600.0
    """Seconds after which a collective counts as hung."""
    replays_experts: bool = False
    """Whether the experts that the engines chose are replayed."""
    slime: dict[str, Any] | None = None
    """slime's `args`, where plugins written for it are to run."""
    shares_gpus: bool = False
    """Memory that it does not use is for others to take."""
    megatron: MegatronTable = field(default_factory=dict)
    """Settings by megatron-core's names."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A trainer state in the store."""

    key_prefix: str
    files: tuple[FileRef, ...]
    model_sha256: str
    optimizer_sha256: str

    @property
    def digest(self) -> StateDigest:
        """What the state is, whatever its files."""
        return StateDigest(self.model_sha256, self.optimizer_sha256)


class TrainerActor:
    """One rank."""

    def __init__(self, spec: TrainerSpec, rank: int, world: int) -> None:
        import torch

        if spec.device == "cpu":
            # More threads than cores make a step fifty times slower, and their sums differ.
            torch.set_num_threads(1)
        if spec.train.deterministic:
            make_deterministic()
        slime.activate(spec.slime)
        self._lines = Lines()
        self._spec = spec
        self._rank = rank
        self._world = world
        self._epoch = 0
        self._objects = Objects.open(spec.storage_root, spec.storage_options)
        self._trainer: Trainer | None = None
        self._sync = WeightSync(rank, objects=self._objects)
        self._node_ranks: list[int] = []
        self._ahead: tuple[tuple[FileRef, ...], pa.Table] | None = None
        self._listener: socket.socket | None = None

    # --- coming up --------------------------------------------------------------------------------

    def rendezvous(self) -> tuple[str, int]:
        """Address of this rank's machine in Ray's network, and a port where it listens."""
        import ray

        address = ray.util.get_node_ip_address()
        self._listener = socket.create_server((address, 0))
        return address, self._listener.getsockname()[1]

    def init_process_group(self, epoch: int, address: str, port: int) -> None:
        """Join the other ranks; rank 0 listens at the address."""
        import torch
        import torch.distributed as dist

        self._check(epoch)
        os.environ |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._world),
        }
        # The way that leads to rank 0, and on one machine loopback: a host's name may mean another.
        if (interface := interface_of(own_address(address))) is not None:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        share_as_sglang()
        cuda = self._spec.device == "cuda"
        if cuda:
            torch.cuda.set_device(0)
        timeout = timedelta(seconds=self._spec.timeout_s)
        # A store of its own making would listen on every address of the machine.
        listening, self._listener = self._listener, None
        store = dist.TCPStore(
            address,
            port,
            self._world,
            is_master=self._rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach() if listening is not None else None,
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._world,
            timeout=timeout,
        )
        self._sync = WeightSync(self._rank, address, self._objects)
        names: list[str] = [""] * self._world
        dist.all_gather_object(names, socket.gethostname())
        self._node_ranks = [r for r, name in enumerate(names) if name == names[self._rank]]

    def prepare_model(self, epoch: int, run_id: str, model: ModelConfig) -> None:
        """Have the starting model in its folder: built, fetched, or found whole."""
        self._check(epoch)
        scratch = Path(self._spec.scratch)
        prepare_model(self._objects, run_id, model, self._spec.seed, scratch)

    def load(self, epoch: int, state_id: str) -> None:
        """Build the trainer from the starting model, with a fresh optimizer."""
        self._check(epoch)
        self._build().load(Path(self._spec.model_folder), state_id)
        keep_loaded()

    def restore(self, epoch: int, saved: SavedState, state_id: str) -> None:
        """Take over a saved state, of whatever number of ranks.

        Raises:
            Corrupt: the files are not there, or not that state.
        """
        import torch.distributed as dist

        self._check(epoch)
        trainer = self._build()
        if trainer.loaded is None and not trainer.dirty:
            trainer.load(Path(self._spec.model_folder), state_id)
        folder = self._objects.local_path(saved.key_prefix)
        fetched = (
            None if folder else Path(self._spec.scratch) / f"restore-{saved.model_sha256[:16]}"
        )
        if fetched is not None:
            # The ranks of one machine share its scratch folder and the work of filling it.
            own = self._node_ranks.index(self._rank)
            files = list(saved.files)[own :: len(self._node_ranks)]
            download_folder(self._objects, files, saved.key_prefix, fetched)
            dist.barrier()
        got = trainer.load_state(folder or fetched, state_id)  # type: ignore[arg-type]
        if fetched is not None:
            dist.barrier()
            shutil.rmtree(fetched, ignore_errors=True)
        if got != saved.digest:
            trainer.loaded, trainer.dirty = None, True
            raise Corrupt(
                f"{self._objects.url(saved.key_prefix)} holds model {got.model_sha256[:12]} and "
                f"optimizer {got.optimizer_sha256[:12]}, its manifest says "
                f"{saved.model_sha256[:12]} and {saved.optimizer_sha256[:12]}"
            )

    def state(self) -> tuple[str | None, bool]:
        """The state that is held, and whether a batch was begun on it and not finished."""
        if self._trainer is None:
            return None, False
        return self._trainer.loaded, self._trainer.dirty

    # --- work -------------------------------------------------------------------------------------

    def read_ahead(self, epoch: int, rollout: tuple[FileRef, ...]) -> None:
        """Read a committed rollout that is going to be trained on, while it is scored."""
        from rlcore.train.batch import read_rollout

        self._check(epoch)
        images = takes_images(self._spec.model_folder)
        experts = self._spec.replays_experts
        table = read_rollout(self._objects, rollout, images=images, experts=experts)
        self._ahead = (rollout, table)

    def train(
        self, epoch: int, prev: str, new: str, files: BatchFiles, max_tokens: int | None = None
    ) -> TrainReport:
        """Train the committed batch: from state `prev` to state `new`; with micro-batches of at
        most `max_tokens` tokens, where the configuration's are too large.
        """
        from rlcore.train.batch import load_batch
        from rlcore.train.offload import give_back_cache

        self._check(epoch)
        trainer = self._held()
        settings = self._spec.train
        if max_tokens is not None:
            settings = settings.model_copy(update={"max_tokens_per_gpu": max_tokens})
        ahead, self._ahead = self._ahead, None
        batch = load_batch(
            self._objects,
            files,
            rollout=ahead[1] if ahead is not None and ahead[0] == files.rollout else None,
            train=settings,
            algorithm=self._spec.algorithm,
            rank=trainer.ranks.rank,
            world=trainer.ranks.size,
            images=trainer.images,
            experts=self._spec.replays_experts,
        )
        report = trainer.train(prev, new, batch)
        if self._spec.shares_gpus:
            give_back_cache(self._device())
        if self._rank == 0:
            log.info("iteration %d: %s", files.iteration, shown(report.named))
        return report

    def log_probs(self, epoch: int, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, at temperature 1."""
        self._check(epoch)
        return self._held().log_probs(sequences)

    def save_state(self, epoch: int, key_prefix: str) -> SavedState:
        """Store this rank's share of the state; the files named are its own."""
        from rlcore.train.fsdp.state import rank_files

        self._check(epoch)
        trainer = self._held()
        in_place = self._objects.local_path(key_prefix)
        folder = in_place or Path(self._spec.scratch) / f"save-{key_prefix.rsplit('/', 1)[-1]}"
        trainer.save_state(folder)
        files = [(path, f"{key_prefix}/{path.name}") for path in rank_files(folder, self._rank)]
        # Digests of the files and of what they hold, and the wait for the disk, side by side.
        with ThreadPoolExecutor(2) as aside:
            if in_place is not None:
                synced = [aside.submit(_to_disk, path) for path, _ in files]
                stored = [aside.submit(file_ref, path, key) for path, key in files]
            else:
                synced = []
                stored = [aside.submit(upload_file, self._objects, *file) for file in files]
            digest = trainer.digest()
            for one in synced:
                one.result()
            refs = tuple(one.result() for one in stored)
        if in_place is None:
            for path, _ in files:
                path.unlink()
        return SavedState(key_prefix, refs, digest.model_sha256, digest.optimizer_sha256)

    def export_hf(self, epoch: int, key_prefix: str, dtype: DType) -> list[FileRef]:
        """Store a Hugging Face folder; rank 0 names its files."""
        self._check(epoch)
        trainer = self._held()
        in_place = self._objects.local_path(key_prefix)
        folder = in_place or Path(self._spec.scratch) / f"export-{key_prefix.rsplit('/', 1)[-1]}"
        trainer.export_hf(folder, dtype)
        if self._rank != 0:
            return []
        for path in folder.rglob("*"):
            if path.is_file():
                _to_disk(path)
        refs = upload_folder(self._objects, folder, key_prefix)
        if in_place is None:
            shutil.rmtree(folder)
        return refs

    def sync(self, epoch: int, spec: SyncSpec) -> SyncReport | None:
        """Push the weights to the engines; rank 0 reports."""
        self._check(epoch)
        trainer = self._held()
        if trainer.dirty:
            raise TrainError(
                "the trainer stopped in the middle of a batch: its weights are no policy"
            )
        return self._sync.run(trainer, spec)

    def canary(self, epoch: int, spec: SyncSpec) -> dict[str, float]:
        """After a sync that left it for later: rank 0 compares the engines with the trainer."""
        self._check(epoch)
        return self._sync.canary(spec) if self._rank == 0 else {}

    def offload(self, epoch: int) -> dict[str, float]:
        """Free the device; what this rank held there before and after, and what is free now."""
        from rlcore.train.offload import free_bytes, held_bytes

        self._check(epoch)
        device = self._device()
        before = held_bytes(device)
        if self._trainer is not None:
            self._trainer.offload()
        return {
            "trainer_gb_before_offload": before / GB,
            "trainer_gb_after_offload": held_bytes(device) / GB,
            "free_gb_for_rollout": free_bytes(device) / GB,
        }

    def onload(self, epoch: int, weights_only: bool) -> dict[str, float]:
        """Take the device's memory again; what was free of it before."""
        from rlcore.train.offload import free_bytes

        self._check(epoch)
        free = free_bytes(self._device())
        if self._trainer is not None:
            self._trainer.onload(weights_only=weights_only)
        return {} if weights_only else {"free_gb_for_training": free / GB}

    def lines(self) -> list[Line]:
        """What was logged since the last call."""
        return self._lines.take()

    def memory(self) -> dict[str, float]:
        """Bytes held, by kind."""
        return {} if self._trainer is None else self._trainer.memory()

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def shutdown(self) -> None:
        """Leave the process group and drop connections."""
        import torch.distributed as dist

        self._sync.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- helpers ----------------------------------------------------------------------------------

    def _check(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise Fenced(
                f"trainer rank {self._rank} has served a driver of epoch {self._epoch}; the call "
                f"is of epoch {epoch}, whose driver has lost the run"
            )
        self._epoch = epoch

    def _device(self) -> torch.device:
        from rlcore.train.fsdp.model import current_device

        return current_device(self._spec.device)

    def _build(self) -> Trainer:
        if self._trainer is None:
            spec = self._spec
            self._trainer = make_trainer(
                spec.train,
                spec.algorithm,
                temperature=spec.temperature,
                seed=spec.seed,
                device=spec.device,
                trust_remote_code=spec.trust_remote_code,
                lora=spec.lora,
                megatron=spec.megatron,
                as_sglang=spec.as_sglang,
            )
        return self._trainer

    def _held(self) -> Trainer:
        if self._trainer is None:
            raise TrainError(f"trainer rank {self._rank} holds no model; load or restore one first")
        return self._trainer


def _to_disk(path: Path) -> None:
    """Make a file survive a loss of power: what a manifest names must be durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
