"""What is checked before a run: in an order that leaves nothing behind, and only what can be."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig, RunConfig, build_config
from rlcore.errors import ConfigError, DataError, PluginError
from rlcore.preflight import check_data, check_model, check_plugins, check_reward, preflight

PLUGIN = """
async def generate(args, sample, sampling_params):
    sample.metadata["turns"] = 2
    return sample

def reward(args, sample, **kwargs):
    return sample.metadata["turns"]

def keyed(args, sample):
    return {"score": 1.0, "strict": 0.0}

def build(folder, seed):
    pass
"""


def config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "prompts.jsonl").write_text('{"prompt": "7="}\n')
    tree: dict[str, Any] = {
        "model": {"build": f"{folder}/plugin.py:build"},
        "data": {"path": f"{folder}/prompts.jsonl"},
        "reward": {"custom_rm_path": f"{folder}/plugin.py:reward"},
        "storage": {"root": f"{folder}/root"},
    }
    return build_config(tree | sections)


def test_bad_input_leaves_not_even_the_root(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none"):
        preflight(config(tmp_path, data={"path": f"{tmp_path}/none.jsonl"}))
    assert not (tmp_path / "root").exists()


def test_a_reward_of_what_a_custom_function_generates_is_not_tried(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="turns"):
        check_reward(config(tmp_path))
    own = {"custom_generate_function_path": f"{tmp_path}/plugin.py:generate"}
    check_reward(config(tmp_path, rollout=own))


def test_a_reward_that_cannot_be_loaded_is_found_all_the_same(tmp_path: Path) -> None:
    own = {"custom_generate_function_path": f"{tmp_path}/plugin.py:generate"}
    wrong = {"custom_rm_path": f"{tmp_path}/plugin.py:rewrd"}
    with pytest.raises(PluginError, match="did you mean 'reward'"):
        check_reward(config(tmp_path, rollout=own, reward=wrong))


def test_the_key_of_evaluations_is_tried_too(tmp_path: Path) -> None:
    keyed = {"custom_rm_path": f"{tmp_path}/plugin.py:keyed", "reward_key": "score"}
    sets = [{"name": "a", "path": f"{tmp_path}/prompts.jsonl"}]

    def tried(key: str) -> RunConfig:
        return config(tmp_path, reward=keyed, eval={"datasets": sets, "reward_key": key})

    check_reward(tried("strict"))
    with pytest.raises(PluginError, match=r"trial with eval\.reward_key .*'strct'"):
        check_reward(tried("strct"))


def test_the_reward_of_a_data_set_is_loaded_before_the_run(tmp_path: Path) -> None:
    own = {"name": "a", "path": f"{tmp_path}/prompts.jsonl"}
    for name in ("keyed", "keyd"):
        own["custom_rm_path"] = f"{tmp_path}/plugin.py:{name}"
        made = config(tmp_path, eval={"datasets": [own]})
        if name == "keyed":
            check_plugins(made)
    with pytest.raises(PluginError, match=r"custom_rm_path of eval\.datasets 'a'.*'keyed'"):
        check_plugins(made)


def test_columns_that_rows_may_lack_are_in_one_of_them(tmp_path: Path) -> None:
    """A held-out set may lack what it has not named itself."""
    data = {"path": f"{tmp_path}/with.jsonl", "custom_rm_key": "rm"}
    own = {"name": "a", "path": f"{tmp_path}/prompts.jsonl"}
    whole = config(tmp_path, data=data, eval={"datasets": [own]})
    (tmp_path / "with.jsonl").write_text('{"prompt": "7=", "rm": null}\n')
    check_data(whole)
    named = config(tmp_path, data=data, eval={"datasets": [own | {"metadata_key": "more"}]})
    with pytest.raises(DataError, match=r"no row of .*prompts\.jsonl has a column 'more'"):
        check_data(named)
    with pytest.raises(DataError, match=r"'custom' \(data.custom_rm_key\)"):
        check_data(config(tmp_path, data=data | {"custom_rm_key": "custom"}))


def test_quantised_weights_are_not_trained(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    folder.mkdir()
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ConfigError, match=r"is what rollout\.hf_checkpoint takes"):
        check_model(ModelConfig(path=str(folder)))
