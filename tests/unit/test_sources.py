"""What a run is made from, by content: data and models must not change, functions may be mended."""

import logging
from pathlib import Path

import pytest

from rlcore import sources
from rlcore.config import RunConfig, build_config
from rlcore.errors import ConfigError
from rlcore.sources import check_sources, fingerprint, sources_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "deep" / "weights").write_bytes(b"w")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "mine.py").write_text("def reward(args, sample): return 0.0\n")
    return tmp_path


def config_in(folder: Path) -> RunConfig:
    data = {"path": f"{folder}/train.jsonl@[0:1]"}
    return build_config(
        {
            "model": {"path": str(folder / "model")},
            "data": data,
            "reward": {"custom_rm_path": f"{folder}/mine.py:reward"},
            "eval": {"eval_interval": 1, "datasets": [{"name": "held-out"} | data]},
        }
    )


def test_every_path_that_is_there_has_a_digest(folder: Path) -> None:
    found = sources_of(config_in(folder))
    names = {"model.path", "data.path", "reward.custom_rm_path", "eval.datasets.0.path"}
    assert set(found) == names
    assert (
        found["data.path"] == found["eval.datasets.0.path"] == fingerprint(folder / "train.jsonl")
    )


def test_a_copy_elsewhere_is_the_same(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import shutil

    other = tmp_path_factory.mktemp("other") / "copy"
    shutil.copytree(folder, other)
    assert sources_of(config_in(other)) == sources_of(config_in(folder))


@pytest.mark.parametrize("file", ["train.jsonl", "model/config.json", "model/deep/weights"])
def test_data_or_a_model_that_changed_is_an_error(folder: Path, file: str) -> None:
    before = sources_of(config_in(folder))
    (folder / file).write_text("other")
    with pytest.raises(ConfigError, match=r"of run r holds something else.*start a new run"):
        check_sources("r", before, sources_of(config_in(folder)))


def test_a_function_that_changed_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = sources_of(config_in(folder))
    check_sources("r", before, sources_of(config_in(folder)))
    assert not caplog.records
    (folder / "mine.py").write_text("def reward(args, sample): return 1.0\n")
    with caplog.at_level(logging.WARNING):
        check_sources("r", before, sources_of(config_in(folder)))
    assert "reward.custom_rm_path of run r was changed" in caplog.text


def test_a_large_file_is_known_by_its_size_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "WHOLE", 100)
    monkeypatch.setattr(sources, "SAMPLE", 10)
    file = tmp_path / "large"
    file.write_bytes(bytes(1000))
    first = fingerprint(file)
    for offset in (0, 9, 990, 999):
        changed = bytearray(1000)
        changed[offset] = 1
        file.write_bytes(changed)
        assert fingerprint(file) != first
    file.write_bytes(bytes(1001))
    assert fingerprint(file) != first
