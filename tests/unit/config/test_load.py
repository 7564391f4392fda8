"""TOML files, `extends`, `--set` and where relative paths are taken from."""

from pathlib import Path

import pytest

from rlcore.config import build_config, load_config, with_sets
from rlcore.config.load import merge, parse_set
from rlcore.config.presets import PRESETS
from rlcore.errors import ConfigError

SMALLEST = """
[model]
path = "model"
[data]
path = "train.jsonl"
[reward]
custom_rm_path = "reward.py:score"
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "run.toml", SMALLEST)


def test_relative_paths_are_taken_from_the_file_that_says_them(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    config = load_config(file)
    assert config.model.path == str(file.parent / "model")
    assert config.data.path == str(file.parent / "train.jsonl")
    assert config.reward.custom_rm_path == f"{file.parent}/reward.py:score"


def test_each_kind_of_path_is_resolved_or_left_alone(tmp_path: Path) -> None:
    file = write(
        tmp_path / "run.toml",
        """
        [model]
        build = "tools/model.py:build"
        [data]
        path = "../rows.jsonl@[0:100]"
        [reward]
        custom_rm_path = "package.module:score"
        [filter]
        dynamic_sampling_filter_path = "filter.py:keep"
        [rollout]
        custom_generate_function_path = "package.module.generate"
        sample_hook_paths = ["hooks.py:one", "package.module:two"]
        [storage]
        root = "s3://bucket/root"
        [[eval.datasets]]
        name = "held-out"
        path = "eval.jsonl"
        """,
    )
    config = load_config(file)
    assert config.model.build == f"{tmp_path}/tools/model.py:build"
    assert config.model.path == ""
    assert config.data.path == f"{tmp_path.parent}/rows.jsonl@[0:100]"
    assert config.reward.custom_rm_path == "package.module:score"
    assert config.filter.dynamic_sampling_filter_path == f"{tmp_path}/filter.py:keep"
    assert config.rollout.custom_generate_function_path == "package.module.generate"
    assert config.rollout.sample_hook_paths == [f"{tmp_path}/hooks.py:one", "package.module:two"]
    assert config.storage.root == "s3://bucket/root"
    assert config.eval.datasets[0].path == f"{tmp_path}/eval.jsonl"


def test_the_name_of_a_built_in_filter_is_no_path(file: Path) -> None:
    config = load_config(file, ["filter.dynamic_sampling_filter_path=nonzero_std"])
    assert config.filter.dynamic_sampling_filter_path == "nonzero_std"


def test_the_default_root_lies_in_the_working_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(file).storage.root == str(tmp_path / "sluice-data")
    assert load_config(file, ["storage.lease_ttl_s=9"]).storage.root == str(
        tmp_path / "sluice-data"
    )


def test_a_file_is_laid_over_the_one_it_extends(tmp_path: Path) -> None:
    write(tmp_path / "base/run.toml", SMALLEST + "[train]\nlr = 0.5\nnum_iterations = 7\n")
    middle = write(tmp_path / "middle.toml", 'extends = "base/run.toml"\n[train]\nlr = 0.25\n')
    top = write(
        tmp_path / "top/top.toml",
        'extends = "../middle.toml"\n[data]\npath = "own.jsonl"\n[train]\nlr_warmup_steps = 3\n',
    )
    config = load_config(top)
    assert (config.train.lr, config.train.num_iterations, config.train.lr_warmup_steps) == (
        0.25,
        7,
        3,
    )
    assert config.data.path == f"{tmp_path}/top/own.jsonl"
    assert config.model.path == f"{tmp_path}/base/model"
    assert load_config(middle).data.path == f"{tmp_path}/base/train.jsonl"


def test_merging_replaces_lists_and_values_and_leaves_both_trees_alone() -> None:
    base = {"a": {"x": 1, "l": [1, 2]}, "b": 1}
    over = {"a": {"l": [3]}, "b": {"c": 2}}
    assert merge(base, over) == {"a": {"x": 1, "l": [3]}, "b": {"c": 2}}
    assert base == {"a": {"x": 1, "l": [1, 2]}, "b": 1}
    assert over == {"a": {"l": [3]}, "b": {"c": 2}}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.lr=1e-5", ["train", "lr"], 1e-5),
        ("train.num_iterations=3", ["train", "num_iterations"], 3),
        ("data.shuffle=false", ["data", "shuffle"], False),
        ('rollout.stop=["a", "b"]', ["rollout", "stop"], ["a", "b"]),
        ("rollout.engine=sglang", ["rollout", "engine"], "sglang"),
        ('run.id="7"', ["run", "id"], "7"),
        ("data.path=a=b.jsonl", ["data", "path"], "a=b.jsonl"),
        ("model.build=", ["model", "build"], ""),
        (" train . lr = 2", ["train", "lr"], 2),
    ],
)
def test_an_option_is_read_as_toml_and_else_as_text(
    text: str, key: list[str], value: object
) -> None:
    assert parse_set(text) == (key, value)


@pytest.mark.parametrize("text", ["train.lr", "=3", "train.=3", ".lr=3", ""])
def test_an_option_without_key_or_value_is_refused(text: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set .* is not of the form section\.key=value"):
        load_config(file, [text])


def test_options_win_over_files_and_the_last_over_the_first(file: Path) -> None:
    sets = ["train.lr=0.1", "train.lr=0.2", "cluster.device=cpu"]
    config = load_config(file, sets)
    assert (config.train.lr, config.cluster.device) == (0.2, "cpu")
    assert with_sets(config, ["train.lr=0.3"]).train.lr == 0.3
    assert with_sets(config, []) == config


def test_a_path_given_as_an_option_is_taken_from_the_working_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    sets = ["data.path=other.jsonl", "reward.custom_rm_path=mine.py:score"]
    for config in (load_config(file, sets), with_sets(load_config(file), sets)):
        assert config.data.path == f"{here}/other.jsonl"
        assert config.reward.custom_rm_path == f"{here}/mine.py:score"
    assert load_config(file, ["data.path=~/x.jsonl"]).data.path == str(Path.home() / "x.jsonl")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("train.num_iteration=3", "did you mean train.num_iterations"),
        ("train.lr=fast", "train.lr = 'fast' is not allowed"),
        ("train.lr.peak=1", "lr is a value, not a section"),
        ("trian.lr=1", "did you mean train"),
    ],
)
def test_a_wrong_option_is_refused_like_a_wrong_file(file: Path, option: str, words: str) -> None:
    file.write_text(SMALLEST + "[train]\nlr = 0.5\n")
    with pytest.raises(ConfigError, match=words):
        load_config(file, [option])


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config file {tmp_path}/none.toml does not exist"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=f"config file {tmp_path} cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml cannot be read"):
        load_config(tmp_path / "binary.toml")


def test_broken_toml_is_told_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", "[model]\npath = 'a'\nlr == 3\n")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: .*line 3"):
        load_config(file)


def test_a_preset_lies_below_what_the_file_says(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", SMALLEST)
    text = 'extends = ["base.toml", "preset:dapo"]\n[algorithm]\nclip_high = 0.3\n'
    config = load_config(write(tmp_path / "run.toml", text))
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.3)
    assert config.filter.dynamic_sampling_filter_path == "nonzero_std"
    assert config.model.path == load_config(tmp_path / "base.toml").model.path


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_configuration(tmp_path: Path, name: str) -> None:
    write(tmp_path / "base.toml", SMALLEST)
    file = write(tmp_path / "run.toml", f'extends = ["base.toml", "preset:{name}"]\n')
    more = ["algorithm.loss_divisor=1024"] if name == "dr_grpo" else []
    config = load_config(file, more)
    for section, keys in PRESETS[name].items():
        for key, value in keys.items():
            assert getattr(getattr(config, section), key) == value
    if more:
        with pytest.raises(ConfigError, match=r"algorithm\.loss_divisor, such as"):
            load_config(file)


def test_a_preset_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no preset 'dappo'; there are dapo, dr_grpo, gspo"):
        load_config(write(tmp_path / "run.toml", 'extends = "preset:dappo"\n'))


def test_extends_must_name_another_file_that_exists(tmp_path: Path) -> None:
    loop = write(tmp_path / "a.toml", 'extends = "b.toml"\n')
    write(tmp_path / "b.toml", 'extends = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"a\.toml extends itself through .*b\.toml"):
        load_config(loop)
    with pytest.raises(ConfigError, match=r"gone\.toml does not exist"):
        load_config(write(tmp_path / "c.toml", 'extends = "gone.toml"\n'))
    with pytest.raises(ConfigError, match=r"extends in .*d\.toml must be the path of a TOML file"):
        load_config(write(tmp_path / "d.toml", "extends = 3\n"))


def test_a_misspelt_key_in_an_extended_file_is_found_too(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", SMALLEST + "[train]\nlearn_rate = 1\n")
    with pytest.raises(ConfigError, match=r"unknown setting train\.learn_rate"):
        load_config(write(tmp_path / "top.toml", 'extends = "base.toml"\n'))


def test_building_leaves_the_given_tree_alone() -> None:
    tree = {"model": {"path": "/m"}, "data": {"path": "/d"}, "reward": {"custom_rm_path": "a:b"}}
    build_config(tree)
    assert set(tree) == {"model", "data", "reward"}
