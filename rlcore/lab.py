"""Every estimator and loss on one stored batch, from one stored policy: a table, and nothing else.

No engine, no Ray and no lease: the batch is read, the run's trainer is made of one rank in this
process, whatever its layout was, and each algorithm's loss and gradient of the whole batch as one
optimizer step are computed and not applied. Old log-probs are the engine's, so that the ratios show
how far the policy is from the one that sampled; importance sampling weighs against them from a
ratio of 1.

Invariant: nothing of the run is changed.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import AlgorithmConfig, RunConfig, TrainConfig
from rlcore.config.presets import PRESETS
from rlcore.errors import Corrupt, DataError, NotFound
from rlcore.slime.compat import state as slime
from rlcore.slime.compat.attributes import slime_args_of
from rlcore.starting_model import model_path, prepare_model
from rlcore.store.branch import kept_state
from rlcore.store.files import download_folder, find_damage
from rlcore.store.manifest import FileRef, Manifest, StageRef
from rlcore.store.run_store import RunStore

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.train.base import BaseTrainer

START = -1
"""Stands for the starting model, where iterations name the policy that follows them."""
OWN = "this run"
LAYOUT = re.compile("parallel|pipeline")
"""In the names of megatron-core's settings that say how ranks divide a model."""


@dataclass(frozen=True)
class Row:
    """One algorithm on the batch."""

    name: str
    settings: dict[str, Any]
    """Of `algorithm`, those that are not at their defaults."""
    metrics: dict[str, float]
    """As in a run's training, without prefix."""
    cosines: dict[str, float | None]
    """Of its gradient with every other's; None where one of them is 0."""


@dataclass(frozen=True)
class Lab:
    """What was measured."""

    run_id: str
    iteration: int
    policy: int
    """The iteration that the policy follows; `START` for the starting model."""
    samples: int
    tokens: int
    rows: tuple[Row, ...]


def variants(config: RunConfig) -> dict[str, AlgorithmConfig]:
    """The algorithms that are compared, the run's own first."""
    made: dict[str, dict[str, Any]] = {
        "grpo": {"loss_aggregation": "sequence_mean"},
        "dapo": PRESETS["dapo"]["algorithm"],
        "dr_grpo": PRESETS["dr_grpo"]["algorithm"]
        | {"loss_divisor": config.rollout.max_response_len},
        "gspo": PRESETS["gspo"]["algorithm"],
        "cispo": {"advantage_estimator": "cispo", "clip_low": 1.0},
        "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus"},
        "reinforce_plus_plus, kl": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.01},
        "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
        **({"ppo": {"advantage_estimator": "ppo"}} if config.algorithm.has_critic else {}),
        "grpo, raw rewards": {"rewards_normalization": False},
        "grpo, whitened": {"normalize_advantages": True},
        "grpo, dual clip": {"eps_clip_c": 3.0},
        "grpo, opsm": {"use_opsm": True},
        "grpo, kl loss": {"use_kl_loss": True},
        "grpo, unbiased kl loss": {"use_kl_loss": True, "use_unbiased_kl": True},
        "grpo, entropy bonus": {"entropy_coef": 0.01},
        "grpo, tis": {"use_tis": True},
        "grpo, tis by sequence": {"use_tis": True, "tis_level": "sequence"},
        "grpo, tis geometric": {"use_tis": True, "tis_level": "geometric"},
        "grpo, icepop": {
            "use_tis": True,
            "tis_mode": "mask",
            "tis_clip_low": 0.5,
            "tis_clip": 5.0,
        },
    }
    free = {"true_on_policy_mode": False, "max_logprob_gap": None}
    own = config.algorithm.model_copy(
        update=free | {"use_rollout_logprobs": not config.algorithm.use_tis}
    )
    others = {
        name: AlgorithmConfig(use_rollout_logprobs="use_tis" not in changes, **changes)
        for name, changes in made.items()
    }
    return {OWN: own, **others}


def run_lab(
    config: RunConfig, store: RunStore, iteration: int, policy: int | None, scratch: Path
) -> Lab:
    """Measure every algorithm on the batch of an iteration.

    Args:
        config: the run's.
        store: the run's.
        iteration: a committed one.
        policy: the iteration whose state is the policy, or `START`; None: the state after
            `iteration`, else the one before it, else the next that is kept.
        scratch: a local folder for what has no local place in the store.

    Raises:
        NotFound: the iteration or the state is not there.
        DataError: nothing of the batch is trained.
        Corrupt: something stored was altered.
    """
    from rlcore.train.batch import load_batch, read_rollout
    from rlcore.train.ranks import one_rank
    from rlcore.train.trainer import BatchFiles

    at, state = find_state(store, iteration, policy)
    files = BatchFiles(
        iteration, *(_stage(store, iteration, s).files for s in ("rollout", "reward", "filter"))
    )
    alone = {"num_steps_per_rollout": 1, "context_parallel_size": 1}
    train = config.train.model_copy(update=alone)
    chosen = variants(config)
    device = _device(config)
    with slime.active(slime_args_of(config)), one_rank(device):
        trainer = _starting(config, train, store, scratch, device)
        if state is not None:
            trainer.load_state(state_folder(store, at, state, scratch), "policy")
        experts = config.rollout.use_rollout_routing_replay
        rollout = read_rollout(
            store.objects, files.rollout, images=trainer.images is not None, experts=experts
        )
        metrics: dict[str, dict[str, float]] = {}
        gradients: dict[str, list[Tensor]] = {}
        for name, algorithm in chosen.items():
            batch = load_batch(
                store.objects,
                files,
                train=train,
                algorithm=algorithm,
                rank=0,
                world=1,
                rollout=rollout,
                images=trainer.images,
                experts=experts,
            )
            if not batch.steps:
                raise DataError(
                    f"nothing of iteration {iteration} of run {store.run_id} is trained: no sample "
                    "of its batch was kept and scored"
                )
            metrics[name], gradients[name] = trainer.measure(batch, algorithm)
    plain = AlgorithmConfig()
    rows = tuple(
        Row(
            name,
            {k: v for k, v in algorithm if v != getattr(plain, k)},
            metrics[name],
            {other: _cosine(gradients[name], gradients[other]) for other in chosen},
        )
        for name, algorithm in chosen.items()
    )
    return Lab(store.run_id, iteration, at, batch.samples, batch.tokens, rows)


def _starting(
    config: RunConfig, train: TrainConfig, store: RunStore, scratch: Path, device: str
) -> "BaseTrainer[Any, Any]":
    """A trainer of the starting model."""
    from rlcore.train.make import make_trainer
    from rlcore.train.trainer import Lora

    trainer = make_trainer(
        train,
        # A reference, for those that need one.
        config.algorithm.model_copy(update={"use_kl_loss": True}),
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        lora=Lora.of(config.model),
        # One rank has the whole model.
        megatron={k: v for k, v in config.megatron.items() if not LAYOUT.search(k)},
    )
    prepare_model(store.objects, store.origin, config.model, config.run.seed, scratch)
    trainer.load(model_path(store.objects, store.origin, config.model, scratch), "start")
    return trainer


def find_state(
    store: RunStore, iteration: int, asked: int | None
) -> tuple[int, dict[str, Any] | None]:
    """The iteration that the policy follows, and its state; none for the starting model."""
    last = store.last_committed()
    there = range(0 if last is None else last + 1)
    _stage(store, iteration, "train")
    order = [iteration, iteration - 1, *range(iteration + 1, len(there))]
    for i in order if asked is None else [asked]:
        if i == START:
            return START, None
        if i in there and (state := kept_state(store, i, _stage(store, i, "train"))) is not None:
            return i, state
    which = "at or after" if asked is None else "after"
    raise NotFound(
        f"run {store.run_id} keeps no trainer state {which} iteration "
        f"{iteration if asked is None else asked} (checkpoint.state_interval and "
        f"checkpoint.keep_last say which are kept); --policy {START} is the starting model"
    )


def _stage(store: RunStore, i: int, name: str) -> Manifest:
    record = store.committed(i) if i >= 0 else None
    if record is None:
        last = store.last_committed()
        there = "none is" if last is None else f"0 to {last} are"
        raise NotFound(f"run {store.run_id} has no committed iteration {i}; {there} committed")
    return store.manifest(StageRef.model_validate(record["stages"][name]))


def state_folder(store: RunStore, i: int, state: dict[str, Any], scratch: Path) -> Path:
    """The trainer's state as a local folder, its files as they were saved."""
    files = [FileRef.model_validate(file) for file in state["files"]]
    for file in files:
        if damage := find_damage(store.objects, file):
            raise Corrupt(f"the trainer's state after iteration {i}: {damage}")
    prefix = state["key_prefix"]
    if (local := store.objects.local_path(prefix)) is not None:
        return local
    download_folder(store.objects, files, prefix, scratch / "state")
    return scratch / "state"


def _device(config: RunConfig) -> str:
    """That a run's trainer is measured on."""
    import torch

    return "cuda" if config.cluster.device != "cpu" and torch.cuda.is_available() else "cpu"


def _cosine(a: "Sequence[Tensor]", b: "Sequence[Tensor]") -> float | None:
    """Of two gradients in parts; None where one is 0."""
    norm = math.sqrt(_dot(a, a) * _dot(b, b))
    return _dot(a, b) / norm if norm else None


def _dot(a: "Sequence[Tensor]", b: "Sequence[Tensor]") -> float:
    return math.fsum(float(x.double() @ y.double()) for x, y in zip(a, b, strict=True))
