"""What every node of a run must see: the starting model, the run's folder, the folders of weights.

With a store on a file system that is mounted everywhere all of it lies there. With S3 a node
fetches the model into its own scratch folder, and weights cannot go by way of a disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.cluster.nodes import Node, on_each, this_node
from rlcore.cluster.plan import FleetPlan
from rlcore.config.tree import ModelConfig, Scalar
from rlcore.errors import ClusterError
from rlcore.starting_model import prepare_model
from rlcore.store.credentials import all_options
from rlcore.store.objects import Objects
from rlcore.store.paths import run_prefix


async def check_shared(plan: FleetPlan, nodes: Sequence[Node]) -> None:
    """Before anything starts: nodes see the store and a named model, and weights can reach them.

    Raises:
        ClusterError: they do not; says which node, and what would mend it.
    """
    config = plan.config
    folder = plan.store.objects.local_path(run_prefix(config.run.id))
    if folder is not None:
        await _check_seen(
            nodes, folder, f"the run's folder in storage.root = {config.storage.root!r}"
        )
    elif (
        len(nodes) > 1 and config.trains and config.generates and config.weights.transport == "disk"
    ):
        raise ClusterError(
            f"weights.transport = 'disk', but the run has {len(nodes)} nodes, and storage.root = "
            f"{config.storage.root!r} is no folder that they share; set weights.transport = "
            "'distributed', or a storage.root on a shared file system"
        )
    if config.rollout.hf_checkpoint:
        await _check_seen(nodes, plan.engine_folder, "the folder of rollout.hf_checkpoint")
    if config.model.path:
        await _check_seen(nodes, Path(config.model.path), "the folder of model.path")


async def share_model(plan: FleetPlan, nodes: Sequence[Node]) -> None:
    """Have the starting model, which was built on one node, in its folder on all, and here.

    Raises:
        Corrupt: what was fetched is damaged.
    """
    objects, config = plan.store.objects, plan.config
    if config.model.path or objects.local_path(run_prefix(config.run.id)) is not None or not nodes:
        return
    args: tuple[Any, ...] = (config.storage.root, all_options(config.storage), plan.store.origin)
    args += (config.model, config.run.seed, str(plan.scratch))
    if (here := this_node()) not in nodes:
        await asyncio.to_thread(_fetch_model, *args)
    await on_each([node for node in nodes if node != here], _fetch_model, *args)


def remove_scratch(nodes: Sequence[Node], scratch: Path) -> None:
    """Remove what actors have left in the scratch folder of other nodes; nobody waits for it."""
    import ray

    task = ray.remote(num_cpus=0, max_retries=0)(_remove)
    for node in nodes:
        task.options(**node.options).remote(str(scratch))


async def _check_seen(nodes: Sequence[Node], folder: Path, what: str) -> None:
    seen = await on_each(nodes, _is_folder, str(folder))
    for node, there in zip(nodes, seen, strict=True):
        if not there:
            raise ClusterError(
                f"{what} is not there on the node {node.address}: {folder}; put it on a file "
                "system that all nodes of the run mount at the same path"
            )


def _is_folder(path: str) -> bool:
    return Path(path).is_dir()


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _fetch_model(
    root: str,
    options: dict[str, Scalar],
    origin: str,
    model: ModelConfig,
    seed: int,
    scratch: str,
) -> None:
    """On a node: what was built is in the store."""
    prepare_model(Objects.open(root, options), origin, model, seed, Path(scratch))
