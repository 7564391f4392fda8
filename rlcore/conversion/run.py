"""A run's trainer state as a Hugging Face folder or a Megatron checkpoint: for states between its
checkpoints.
"""

from pathlib import Path
from typing import Any, Literal

from rlcore.config import RunConfig
from rlcore.conversion.convert import Conversion, state_to_hf, state_to_torch_dist
from rlcore.errors import NotFound
from rlcore.lab import state_folder
from rlcore.starting_model import model_path, prepare_model
from rlcore.store.branch import kept_state
from rlcore.store.manifest import StageRef
from rlcore.store.run_store import RunStore
from rlcore.train.trainer import DType


def convert_run(
    config: RunConfig,
    store: RunStore,
    iteration: int | None,
    target: Path,
    dtype: DType | None,
    scratch: Path,
    to: Literal["huggingface", "torch_dist"] = "huggingface",
    padded_vocab_size: int | None = None,
) -> Conversion:
    """Convert the trainer state after an iteration.

    Args:
        config: the run's.
        store: the run's.
        iteration: None: the newest whose state is kept.
        target: must not exist.
        dtype: of the weights; None: float32.
        scratch: a local folder for what has no local place in the store.
        to: what is written.
        padded_vocab_size: rows of a Megatron checkpoint's embedding; None: one a token.

    Raises:
        NotFound: the state is not kept; says which are.
        ConfigError, DataError: as `state_to_hf`.
        Corrupt: a file was altered.
    """
    at, state = find_state(store, iteration)
    prepare_model(store.objects, store.origin, config.model, config.run.seed, scratch)
    model = model_path(store.objects, store.origin, config.model, scratch)
    alpha = None if config.model.lora_rank is None else config.model.lora_alpha
    folder = state_folder(store, at, state, scratch)
    if to == "torch_dist":
        return state_to_torch_dist(folder, target, model, dtype, alpha, padded_vocab_size)
    return state_to_hf(folder, target, model, dtype, alpha)


def find_state(store: RunStore, iteration: int | None) -> tuple[int, dict[str, Any]]:
    """The kept trainer state after an iteration, or the newest, with its iteration."""
    store.load_run()
    last = store.last_committed()
    there = []
    for i in range(-1 if last is None else last, -1, -1):
        record = store.committed(i)
        if record is None or "train" not in record["stages"]:
            continue
        train = store.manifest(StageRef.model_validate(record["stages"]["train"]))
        state = kept_state(store, i, train)
        if state is None:
            continue
        if iteration in (None, i):
            return i, state
        there.append(i)
    kept = ", ".join(map(str, reversed(there))) or "none"
    which = "no trainer state" if iteration is None else f"no trainer state after {iteration}"
    raise NotFound(
        f"run {store.run_id} keeps {which}; kept are those after: {kept} "
        "(checkpoint.state_interval and checkpoint.keep_last say which are)"
    )
