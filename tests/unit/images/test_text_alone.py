"""What knows of text alone is refused where prompts have images, for it would see placeholders."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import RunConfig, build_config
from rlcore.errors import ConfigError
from rlcore.opening import create_or_check, open_store
from rlcore.preflight import check_images
from rlcore.stored_runs import check_media


def folder(path: Path, *, sees: bool) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"vision_config": {}} if sees else {}))
    return str(path)


def config(tmp_path: Path, run_id: str, **sections: dict[str, Any]) -> RunConfig:
    keys = {"multimodal_keys": {"image": "pics"}}
    tree: dict[str, Any] = {
        "run": {"id": run_id},
        "model": {"path": folder(tmp_path / "vl", sees=True)},
        "data": {"path": f"{tmp_path}/prompts.jsonl"} | keys,
        "reward": {"rm_type": "math"},
        "storage": {"root": f"{tmp_path}/root"},
    }
    return build_config(tree | sections)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "fault"),
    [
        ({}, ""),
        ({"use_opd": True, "opd_teacher_load": "sees"}, ""),
        ({"use_opd": True, "opd_teacher_load": "text"}, "opd_teacher_load = .* takes no images"),
        (
            {"custom_convert_samples_to_train_data_path": "mine:convert"},
            "custom_convert_samples_to_train_data_path makes sequences of text alone, but",
        ),
    ],
)
def test_each_part_of_the_training_sees_them(
    tmp_path: Path, algorithm: dict[str, Any], fault: str, stored: bool
) -> None:
    if name := algorithm.get("opd_teacher_load"):
        algorithm = algorithm | {
            "opd_teacher_load": folder(tmp_path / "teacher", sees=name == "sees")
        }
    own = config(tmp_path, "own", algorithm=algorithm)
    if stored:
        other = config(tmp_path, "other")
        create_or_check(open_store(other), other, {})
        run = {"id": "own", "mode": "debug-train-only", "train_from": "other"}
        # Its own rows are not read, so what it says of them is not what counts.
        own = config(tmp_path, "own", algorithm=algorithm, run=run, data={"path": "none.jsonl"})

    def check() -> None:
        if stored:
            check_media(open_store(own), own)
        else:
            check_images(own)

    if not fault:
        check()
        return
    with pytest.raises(ConfigError, match=f"{fault}.* images"):
        check()


def test_a_model_of_text_does_not_train_on_stored_images(tmp_path: Path) -> None:
    other = config(tmp_path, "other")
    create_or_check(open_store(other), other, {})
    run = {"id": "own", "mode": "debug-train-only", "train_from": "other"}
    text = folder(tmp_path / "text", sees=False)
    own = config(tmp_path, "own", run=run, model={"path": text}, data={"path": "none.jsonl"})
    with pytest.raises(ConfigError, match=r"text takes no images .* run\.train_from = 'other'"):
        check_media(open_store(own), own)
    # One that is built is looked at once it is there.
    built = config(tmp_path, "own", run=run, model={"build": "m.py:b"}, data={"path": "none.jsonl"})
    check_media(open_store(built), built)
    (tmp_path / "root/runs/own").mkdir()
    folder(tmp_path / "root/runs/own/model", sees=False)
    with pytest.raises(ConfigError, match=r"the model of .*m\.py:b takes no images"):
        check_media(open_store(built), built)
