"""`sluice convert` knows what its source is, and refuses options that mean nothing for it."""

from pathlib import Path
from typing import Any

import pytest
import tiny_families

from flows.commands.convert import convert
from rlcore.conversion.sources import HfFolder
from rlcore.errors import ConfigError, NotFound


def run(source: Path | str, target: Path, **options: Any) -> None:
    given = dict.fromkeys(("model", "iteration", "dtype", "padded_vocab_size")) | options
    root = str(target.parent / "root")
    convert(str(source), target, root=root, as_json=False, **given)


def test_the_source_says_what_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_families.build("qwen2", tmp_path / "model")
    run(tmp_path / "model", tmp_path / "dist", padded_vocab_size=128)
    assert "27 tensors" in capsys.readouterr().out
    run(tmp_path / "dist", tmp_path / "back", model=tmp_path / "model", dtype="bfloat16")
    assert HfFolder(tmp_path / "back").dtype("model.norm.weight") == "BF16"
    with pytest.raises(ConfigError, match="--model"):
        run(tmp_path / "dist", tmp_path / "more")


def test_options_without_a_meaning_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--dtype has no meaning for a Hugging Face folder"):
        run(tmp_path, tmp_path / "out", dtype="bfloat16")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="is neither a Hugging Face folder"):
        run(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="--padded-vocab-size has no meaning for a run"):
        run("some-run", tmp_path / "out", padded_vocab_size=8)
    with pytest.raises(NotFound):
        run("some-run", tmp_path / "out")
