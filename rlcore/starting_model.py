"""The folder of the model that a run starts from.

A folder named by `model.path` is used where it lies. One that `model.build` makes is built once and
kept with the run, so that a resumed run starts from the same bytes, on any machine.
"""

import json
from pathlib import Path

from rlcore.config import ModelConfig
from rlcore.errors import ConfigError, Corrupt, PluginError
from rlcore.models.presets import check_preset
from rlcore.plugins import load_checked
from rlcore.store.files import download_folder, find_damage, upload_folder
from rlcore.store.manifest import FileRef, canonical_json
from rlcore.store.objects import Objects
from rlcore.store.paths import model_listing_key, model_prefix


def model_path(objects: Objects, run_id: str, model: ModelConfig, scratch: Path) -> Path:
    """The local folder that the starting model has, or will have once it is prepared."""
    if model.path:
        return Path(model.path)
    return objects.local_path(model_prefix(run_id)) or scratch / "model"


def prepare_model(
    objects: Objects, run_id: str, model: ModelConfig, seed: int, scratch: Path
) -> None:
    """Have the starting model in its local folder: built, fetched, or found whole.

    Args:
        objects: the store.
        run_id: the run.
        model: where the model comes from.
        seed: handed to `model.build`.
        scratch: a local folder for what has no local place in the store.

    Raises:
        ConfigError: `model.build` wrote no model, or not the one of `model.preset`.
        PluginError: it raised.
        Corrupt: the kept folder was altered.
    """
    if model.path:
        return
    prefix = model_prefix(run_id)
    listing = model_listing_key(run_id)
    if not objects.exists(listing):
        made = _build(model.build, seed, scratch / "building")
        if model.preset:
            check_preset(model.preset, made)
        refs = upload_folder(objects, made, prefix)
        objects.put_if_absent(listing, canonical_json([r.model_dump(mode="json") for r in refs]))
    if objects.local_path(prefix) is None:
        download_folder(objects, _listed(objects, run_id), prefix, scratch / "model")
    check_in_place(objects, run_id, model, scratch)


def is_in_place(objects: Objects, run_id: str, model: ModelConfig) -> bool:
    """Whether the model's folder needs no preparing: it is named, or it was built on a disk that
    all see.
    """
    kept_here = objects.local_path(model_prefix(run_id)) is not None
    return bool(model.path) or (kept_here and objects.exists(model_listing_key(run_id)))


def check_in_place(objects: Objects, run_id: str, model: ModelConfig, scratch: Path) -> None:
    """The files of a model that was built are those that were built, and of the preset.

    Raises:
        Corrupt: one was altered.
        ConfigError: it is not the model of `model.preset`.
    """
    for ref in [] if model.path else _listed(objects, run_id):
        if damage := find_damage(objects, ref):
            raise Corrupt(f"the starting model of run {run_id} is damaged: {damage}")
    if model.build and model.preset:
        check_preset(model.preset, model_path(objects, run_id, model, scratch))


def model_digest(objects: Objects, run_id: str, model: ModelConfig) -> str:
    """What names the starting model: its folder's name, or the digests of the files that were
    built.
    """
    return model.path.rpartition("/")[2] or objects.get(model_listing_key(run_id)).decode()


def _listed(objects: Objects, run_id: str) -> list[FileRef]:
    return [
        FileRef.model_validate(item) for item in json.loads(objects.get(model_listing_key(run_id)))
    ]


def _build(spec: str, seed: int, folder: Path) -> Path:
    folder.mkdir(parents=True)
    build = load_checked(spec, "model.build", "build")
    try:
        build(folder, seed)
    except Exception as error:
        # A custom function may raise anything; all of it is the plugin's fault.
        raise PluginError(
            f"model.build = {spec!r} raised {type(error).__name__}: {error}"
        ) from error
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"model.build = {spec!r} wrote no config.json into the folder it was given"
        )
    return folder
