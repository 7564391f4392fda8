"""The folder of the model that a run starts from.

A folder named by `model.path` is used where it lies. One that `model.build` makes is built once and kept
with the run, so that a resumed run starts from the same bytes, on any machine.
"""

import json
from pathlib import Path

from rlcore.config import ModelConfig
from rlcore.errors import ConfigError, Corrupt, NotFound
from rlcore.plugins import load_function
from rlcore.store.files import download_folder, find_damage, upload_folder
from rlcore.store.manifest import FileRef, canonical_json
from rlcore.store.objects import Objects
from rlcore.store.paths import run_prefix


def starting_model(
    objects: Objects, run_id: str, model: ModelConfig, seed: int, scratch: Path
) -> Path:
    """The local folder of the starting model.

    Args:
        objects: the store.
        run_id: the run.
        model: where the model comes from.
        seed: handed to `model.build`.
        scratch: a local folder for what has no local place in the store.

    Raises:
        ConfigError: `model.build` wrote no model.
        Corrupt: the kept folder was altered.
    """
    if model.path:
        return Path(model.path)
    prefix = f"{run_prefix(run_id)}/model"
    listing = f"{prefix}/_FILES.json"
    if not objects.exists(listing):
        made = _build(model.build, seed, scratch / "building")
        refs = upload_folder(objects, made, prefix)
        objects.put_if_absent(listing, canonical_json([r.model_dump(mode="json") for r in refs]))
    refs = [FileRef.model_validate(item) for item in json.loads(objects.get(listing))]
    local = objects.local_path(prefix)
    if local is None:
        download_folder(objects, refs, prefix, scratch / "model")
        return scratch / "model"
    for ref in refs:
        if damage := find_damage(objects, ref):
            raise Corrupt(f"the starting model of run {run_id} is damaged: {damage}")
    return local


def model_digest(objects: Objects, run_id: str, model: ModelConfig) -> str:
    """What names the starting model: the path, or the digests of the files that were built."""
    if model.path:
        return model.path
    try:
        return objects.get(f"{run_prefix(run_id)}/model/_FILES.json").decode()
    except NotFound:
        raise Corrupt(f"run {run_id} has lost its starting model") from None


def _build(spec: str, seed: int, folder: Path) -> Path:
    folder.mkdir(parents=True)
    load_function(spec, "model.build")(folder, seed)
    if not (folder / "config.json").exists():
        raise ConfigError(f"model.build = {spec!r} wrote no config.json into the folder it was given")
    return folder
