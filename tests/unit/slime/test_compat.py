"""Plugins written for slime run as they are, where `compat.slime` says so, and nowhere else."""

import asyncio
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.commands.check_plugin import check
from rlcore.config import RunConfig, build_config
from rlcore.errors import ConfigError, PluginError
from rlcore.plugin_check import check_plugin, kind_of
from rlcore.plugins import Kind, load_function
from rlcore.rollout.args import PluginArgs
from rlcore.sample import Sample
from rlcore.slime.compat import state
from rlcore.slime.compat.attributes import slime_args, slime_args_of
from rlcore.slime.compat.imports import NAMES
from rlcore.slime.rules import Setting
from rlcore.slime.table import BY_NAME

PLUGINS = Path(__file__).with_name("plugins")


def config(**more: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": "/models/tiny"},
        "data": {"path": "/data/p.jsonl"},
        "reward": {"rm_type": "math"},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "max_response_len": 10},
        "train": {"global_batch_size": 8},
        "compat": {"slime": True, "args": {"max_turns": 2}},
    }
    return build_config(tree | more)


@pytest.fixture
def compat() -> Iterator[None]:
    with state.active(slime_args_of(config())):
        yield


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert slime_args_of(config(compat={})) is None
    # A copy: another test of this process may have loaded the file already.
    copy = shutil.copy(PLUGINS / "search_agent.py", tmp_path)
    with pytest.raises(PluginError, match=r"compat\.slime = true"):
        load_function(f"{copy}:generate", "x")
    with pytest.raises(ConfigError, match=r"compat\.slime = false"):
        config(compat={"args": {"max_turns": 2}})


def test_every_name_is_there_and_gone_afterwards() -> None:
    before = set(sys.modules), list(sys.meta_path)
    with state.active({}):
        for module, names in NAMES.items():
            found = importlib.import_module(module)
            assert {name for name in names if hasattr(found, name)} == set(names)
        types = importlib.import_module("slime.utils.types")
        assert types.Sample is Sample and types.Sample.Status.COMPLETED == "completed"
    assert not [name for name in set(sys.modules) - before[0] if name.startswith("slime")]
    assert list(sys.meta_path) == before[1] and not hasattr(Sample, "Status")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import slime.backends.megatron_utils.loss", "does not exist under compat.slime"),
        ("from slime.utils.typs import Sample", "the nearest is slime.utils.types"),
        ("from slime.utils.types import Sampel", "slime.utils.types has no 'Sampel'"),
        ("from slime.rollout import data_sorce", "slime.rollout has no 'data_sorce'"),
    ],
)
def test_what_is_not_there_is_told(compat: None, tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "m.py").write_text(f"{line}\ndef f(args, sample): ...\n")
    with pytest.raises(PluginError, match=said):
        load_function(f"{tmp_path}/m.py:f", "x")


def test_a_real_slime_steps_aside_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    real = importlib.import_module("slime")
    try:
        with state.active({}):
            assert importlib.import_module("slime") is not real
            assert "plugins get Sluice's names" in caplog.text
        assert importlib.import_module("slime") is real
    finally:
        del sys.modules["slime"]


def test_args_have_slime_s_names_and_what_is_so_here(compat: None) -> None:
    args: Any = PluginArgs({"timeout_s": 3.0})
    assert args.timeout_s == 3.0
    assert (args.rollout_batch_size, args.n_samples_per_prompt) == (4, 2)
    assert (args.rollout_max_response_len, args.rollout_seed) == (10, 0)
    assert (args.hf_checkpoint, args.rm_type) == ("/models/tiny", "math")
    assert (args.group_rm, args.disable_rewards_normalization) == (False, False)
    assert args.distributed_timeout_minutes == 60.0
    assert (args.offload_train, args.use_fault_tolerance) == (False, True)
    assert args.max_turns == 2
    with pytest.raises(AttributeError, match="read-only"):
        args.max_turns = 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("custom_model_provider_path", "no counterpart"),
        ("rollout_max_respons_len", "did you mean 'rollout_max_response_len'"),
        ("num_gpus_per_node", "Ray knows"),
        ("sglang_router_ip", "where engines are"),
        ("tool_url_of_mine", r"\[compat.args\]"),
    ],
)
def test_attributes_without_a_counterpart_say_what_is_nearest(
    compat: None, name: str, said: str
) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(PluginArgs({}), name)


def test_every_setting_of_the_table_is_an_attribute() -> None:
    found = slime_args(config().model_dump(mode="json"))
    names = {a.name.replace("-", "_") for a in BY_NAME.values() if isinstance(a.rule, Setting)}
    assert names <= set(found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("search_agent.py:reward_func", "reward"),
        ("filters.py:check_spread", "filter"),
        ("filters.py:newest_first", "buffer_filter"),
        ("filters.py:look", "all_samples"),
        ("own_rollout.py:generate_rollout", "rollout"),
        ("mismatch.py:sequence_weights", "tis"),
    ],
)
def test_check_plugin_takes_them(compat: None, name: str, kind: Kind) -> None:
    assert kind_of(f"{PLUGINS}/{name}") == kind
    found = check_plugin(f"{PLUGINS}/{name}", kind, reward_key="score")
    assert [one for one in found if one.problem] == []


def test_check_plugin_knows_slime_only_where_it_is_told(tmp_path: Path) -> None:
    spec = f"{shutil.copy(PLUGINS / 'filters.py', tmp_path)}:check_spread"
    options: dict[str, Any] = {"reward_key": None, "model": None, "as_json": True}
    with pytest.raises(PluginError, match=r"compat\.slime = true"):
        check(spec, None, **options)
    assert check(spec, None, slime=True, **options) == 0


async def test_each_task_is_served_with_a_pool_of_its_own() -> None:
    async def one(pool: Any) -> Any:
        state.serve(pool, None)
        await asyncio.sleep(0)
        return state.serving().pool

    with state.active({}):
        assert await asyncio.gather(one("evaluation"), one("rollout")) == ["evaluation", "rollout"]
