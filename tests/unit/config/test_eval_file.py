"""Evaluation sets from a YAML file and from the command line."""

import re
from pathlib import Path
from typing import Any

import pytest

from flows.cli import app
from rlcore.config import build_config, load_config
from rlcore.config.load import with_eval_sets
from rlcore.errors import ConfigError

TOML = """
[model]
path = "m"
[data]
path = "d.jsonl"
[reward]
custom_rm_path = "r.py:f"
[rollout]
temperature = 0.8
[eval]
eval_interval = 2
"""
YAML = """
eval:
  defaults:
    n_samples_per_eval_prompt: 4
    label_key: answer
    top_p: 0.5
  datasets:
    - name: aime
      path: aime.jsonl@[0:10]
      rm_type: math
      top_p: 0.9
      stop: ["\\n"]
      custom_generate_function_path: turns.py:generate
    - name: gpqa
      path: /abs/gpqa.parquet
      temperature: 0.0
      n_samples_per_eval_prompt: 1
      label_key: null
      metadata_overrides: {level: 3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(TOML + 'eval_config = "sets/eval.yaml"\n')
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "eval.yaml").write_text(YAML)
    return tmp_path


def test_a_yaml_file_gives_the_data_sets(folder: Path) -> None:
    config = load_config(folder / "run.toml")
    aime, gpqa = config.eval.datasets
    assert aime.path == f"{folder}/sets/aime.jsonl@[0:10]"
    assert aime.custom_generate_function_path == f"{folder}/sets/turns.py:generate"
    assert (aime.n_samples_per_eval_prompt, aime.rm_type, aime.stop) == (4, "math", ["\n"])
    assert (aime.temperature, aime.top_p, gpqa.temperature, gpqa.top_p) == (0.8, 0.9, 0.0, 0.5)
    assert (aime.label_key, gpqa.label_key) == ("answer", None)
    assert (gpqa.path, gpqa.metadata_overrides) == ("/abs/gpqa.parquet", {"level": 3})
    # What is stored needs the file no more.
    (folder / "sets" / "eval.yaml").unlink()
    assert config.eval.eval_config == ""
    assert build_config(config.model_dump()) == config


def test_data_sets_may_be_named_by_their_keys(folder: Path) -> None:
    (folder / "sets" / "eval.yaml").write_text("datasets: {a: a.jsonl, b: {path: b.jsonl}}\n")
    config = load_config(folder / "run.toml")
    assert [(d.name, d.path) for d in config.eval.datasets] == [
        ("a", f"{folder}/sets/a.jsonl"),
        ("b", f"{folder}/sets/b.jsonl"),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("datasets: []", "no datasets"),
        ("eval: {defaults: {temprature: 1}, datasets: [{name: a, path: b}]}", "'temperature'?"),
        ("eval: {defaults: {path: x}, datasets: [{name: a, path: b}]}", "unknown key 'path'"),
        ("datasets: [{name: a, path: b, app_service: x}]", "unknown key 'app_service'"),
        ("datasets: [3]", "must be a table; it is 3"),
        ("other: 1", "a table `eval` of `defaults` and `datasets`"),
        ("a: [", "no YAML that can be read"),
    ],
)
def test_what_is_wrong_in_it_is_named(folder: Path, text: str, fault: str) -> None:
    (folder / "sets" / "eval.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"eval\.yaml.*{re.escape(fault)}"):
        load_config(folder / "run.toml")


def test_it_is_used_instead_of_data_sets(folder: Path) -> None:
    (folder / "both.toml").write_text(
        'extends = "run.toml"\n[[eval.datasets]]\nname = "x"\npath = "x.jsonl"\n'
    )
    with pytest.raises(ConfigError, match="both given"):
        load_config(folder / "both.toml")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(folder / "run.toml", ["eval.eval_config=none.yaml"])


def test_names_and_paths_on_the_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    base = load_config(folder / "run.toml")
    config = with_eval_sets(base, ["a", "a.jsonl", "b", "/b.jsonl@[0:3]"])
    assert [(d.name, d.path, d.temperature) for d in config.eval.datasets] == [
        ("a", f"{folder}/a.jsonl", 0.8),
        ("b", "/b.jsonl@[0:3]", 0.8),
    ]
    with pytest.raises(ConfigError, match="pairs of a name and a path"):
        with_eval_sets(base, ["a"])
    words = ["train", "run.toml", "--eval-prompt-data", "a", "a.jsonl", "b", "b.jsonl", "--json"]
    _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
    given: dict[str, Any] = bound.arguments
    assert given["eval_prompt_data"] == ("a", "a.jsonl", "b", "b.jsonl") and given["json"]
