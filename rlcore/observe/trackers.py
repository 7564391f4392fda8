"""Metrics of a run for the tools that people compare runs with.

A tracker is a view: what it shows is made from the store. A driver that takes a run over gives it
all committed iterations again, and it takes those that it lacks: nothing is missing and nothing
twice after a kill.
"""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlcore.config.tracking import TrackingConfig
from rlcore.config.tree import RunConfig
from rlcore.errors import ConfigError
from rlcore.observe.aside import Aside
from rlcore.observe.boards import MLflow, TensorBoard, Tracker, Wandb
from rlcore.observe.history import iterations
from rlcore.store.manifest import sha256_hex
from rlcore.store.objects import Objects
from rlcore.store.paths import run_prefix
from rlcore.store.run_store import RunStore

EXTRAS = {"tensorboard": "tracking", "wandb": "wandb", "mlflow": "mlflow"}
"""Trackers, by the setting and module of their name, and the extra that brings each."""
PROJECT = "sluice"
WANDB_CLOUD = "https://api.wandb.ai"
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
TOLD_APART = 12
"""Digits that tell runs of one name apart, such as one that was made again."""


def check_trackers(config: RunConfig) -> None:
    """The trackers that are asked for can be used here.

    Raises:
        ConfigError: naming the setting.
    """
    tracking = config.tracking
    for name, extra in EXTRAS.items():
        if getattr(tracking, name) and find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name} = true, but {name} is not installed: pip install "
                f"'sluice-rl[{extra}]'"
            )
    if tracking.tensorboard and "://" in config.storage.root and not tracking.tensorboard_dir:
        raise ConfigError(
            f"tracking.tensorboard = true with storage.root = {config.storage.root!r}: "
            "TensorBoard's files need a local folder; set tracking.tensorboard_dir"
        )
    if tracking.wandb and wandb_mode(tracking) == "online" and not _has_key(tracking):
        raise ConfigError(
            "tracking.wandb = true, but there is no key: set WANDB_API_KEY, run `wandb login`, or "
            "set tracking.wandb_mode = 'offline'"
        )
    if tracking.mlflow and not mlflow_uri(tracking):
        raise ConfigError(
            "tracking.mlflow = true, but there is no server: set tracking.mlflow_tracking_uri or "
            "MLFLOW_TRACKING_URI"
        )


def open_trackers(config: RunConfig, objects: Objects) -> list[Aside]:
    """The trackers that are asked for, each told what is committed already."""
    made = dict(_makers(config, objects))
    past = iterations(objects, config.run.id) if made else []
    return [Aside(name, make, past) for name, make in made.items()]


def tracked_id(objects: Objects, run_id: str) -> str:
    """What a run is known by elsewhere: the same for all its drivers, another for another run of
    the name.
    """
    created = RunStore(objects, run_id).load_run()["created"]
    return f"{run_id}-{sha256_hex(str(created).encode())[:TOLD_APART]}"


def wandb_mode(tracking: TrackingConfig) -> str:
    """How wandb is asked to work."""
    return tracking.wandb_mode or os.environ.get("WANDB_MODE") or "online"


def mlflow_uri(tracking: TrackingConfig) -> str:
    """Where MLflow is; empty: nowhere."""
    return tracking.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")


def wandb_arguments(config: RunConfig, objects: Objects) -> dict[str, Any]:
    """What `wandb.init` is called with, beside its settings."""
    tracking, run_id = config.tracking, config.run.id
    own = objects.local_path(f"{run_prefix(run_id)}/wandb")
    folder = Path(tracking.wandb_dir) if tracking.wandb_dir else own
    return {
        "project": tracking.wandb_project or PROJECT,
        "entity": tracking.wandb_entity or None,
        "group": tracking.wandb_group or None,
        "id": tracking.wandb_run_id or tracked_id(objects, run_id),
        "name": run_id,
        "mode": tracking.wandb_mode,
        "dir": None if folder is None else str(folder),
        # Offline nobody can say what is there already.
        "resume": "allow" if wandb_mode(tracking) == "online" else None,
        "config": config.model_dump(mode="json"),
        "allow_val_change": True,
        "reinit": "create_new",
    }


def _makers(config: RunConfig, objects: Objects) -> Iterator[tuple[str, Callable[[], Tracker]]]:
    tracking, run_id = config.tracking, config.run.id
    if tracking.tensorboard:
        own = objects.local_path(f"{run_prefix(run_id)}/tensorboard")
        given = tracking.tensorboard_dir
        folder = Path(given) / run_id if given else own
        assert folder is not None
        yield "TensorBoard", lambda: TensorBoard(folder)
    if tracking.wandb:
        yield "wandb", lambda: _open_wandb(config, objects)
    if tracking.mlflow:
        yield "MLflow", lambda: _open_mlflow(config, objects)


def _open_wandb(config: RunConfig, objects: Objects) -> Tracker:
    import wandb

    arguments = wandb_arguments(config, objects)
    if arguments["dir"] is not None:
        Path(arguments["dir"]).mkdir(parents=True, exist_ok=True)
    host = config.tracking.wandb_host
    # The run's output is its own affair.
    settings = wandb.Settings(console="off", **({"base_url": host} if host else {}))
    return Wandb(wandb.init(settings=settings, **arguments))


def _open_mlflow(config: RunConfig, objects: Objects) -> Tracker:
    from mlflow import MlflowClient

    tracking, run_id = config.tracking, config.run.id
    return MLflow(
        MlflowClient(tracking_uri=mlflow_uri(tracking)),
        experiment=tracking.mlflow_experiment or PROJECT,
        tag=tracked_id(objects, run_id),
        name=run_id,
        settings=config.model_dump(mode="json"),
    )


def _has_key(tracking: TrackingConfig) -> bool:
    """Whether wandb finds a key without asking for one."""
    if any(map(os.environ.get, WANDB_KEYS)):
        return True
    address = tracking.wandb_host or os.environ.get("WANDB_BASE_URL") or WANDB_CLOUD
    place = os.environ.get("NETRC") or str(Path.home() / ".netrc")
    try:
        return netrc(place).authenticators(urlsplit(address).hostname or "") is not None
    except (OSError, NetrcParseError):
        return False
