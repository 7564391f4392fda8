"""Parameters of flow runs that Prefect starts."""

from pathlib import Path

import pytest

from flows.operation.deployed import asked_for
from rlcore.config import RunConfig, load_config
from rlcore.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "run.toml"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(QUICKSTART, [f"storage.root='{tmp_path}'", "run.id=r"])


def plain() -> RunConfig:
    """As the form sends it, without a root."""
    tree = load_config(QUICKSTART).model_dump()
    del tree["storage"]
    return RunConfig.model_validate(tree)


def test_overrides_replace_single_settings(config: RunConfig) -> None:
    values = {"run.id": "mine", "train.lr": 1, "eval.datasets": [], "eval.eval_interval": None}
    made = asked_for(config, values, "7")
    assert (made.run.id, made.train.lr, made.eval.datasets) == ("mine", 1.0, [])
    assert made.rollout == config.rollout
    tables = {"run": {"id": "mine"}, "train": {"lr": 1}}
    tables["eval"] = {"datasets": [], "eval_interval": None}
    assert asked_for(config, tables, "7") == made


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"train.lrr": 1}, "did you mean train.lr?"),
        ({"train": {"lrr": 1}}, "did you mean train.lr?"),
        ({"train.lr": "much"}, "train.lr = 'much' is not allowed"),
        ({"train": 1}, "train = 1 is not allowed"),
        ({"train.lr.peak": 1}, "lr is a value, not a section"),
    ],
)
def test_overrides_are_checked(config: RunConfig, values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        asked_for(config, values, "7")


def test_a_run_without_a_name_is_called_after_its_flow_run(tmp_path: Path) -> None:
    assert asked_for(plain(), {}, "7-a").run.id == "run-7-a"


def test_the_root_is_the_worker_s_where_nobody_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig
) -> None:
    monkeypatch.setenv("SLUICE_ROOT", "/worker")
    assert asked_for(plain(), {}, "7").storage.root == "/worker"
    assert asked_for(plain(), {"storage.root": "/mine"}, "7").storage.root == "/mine"
    assert asked_for(config, {}, "7").storage.root == str(tmp_path)
    empty = config.model_copy(update={"storage": config.storage.model_copy(update={"root": ""})})
    assert asked_for(empty, {}, "7").storage.root == "/worker"
