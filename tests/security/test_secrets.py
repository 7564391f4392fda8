"""Secrets are refused where they would be written down, and taken from where they would not."""

import asyncio
import json
import pickle
from pathlib import Path

import pytest
from prefect.blocks.system import Secret
from prefect.testing.utilities import prefect_test_harness

from flows.operation.credentials import fetch_credentials
from rlcore.cluster.plan import FleetPlan, rollout_plan
from rlcore.config import build_config, load_config
from rlcore.config.tree import StorageConfig
from rlcore.errors import ConfigError
from rlcore.opening import create_or_check, open_store
from rlcore.store import credentials
from rlcore.store.objects import Objects

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
PLANTED = "pl4nted-s3cret"


@pytest.mark.parametrize(
    "option",
    ["secret", "key", "token", "aws_secret_access_key", "AWS_SESSION_TOKEN", "password", "sas-sig"],
)
def test_a_secret_in_the_configuration_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"storage\.options\.{option} is a secret") as caught:
        load_config(QUICKSTART, [f"storage.options.{option}={PLANTED}"])
    assert "FSSPEC_S3_SECRET" in str(caught.value)
    assert "storage.credentials_block" in str(caught.value)
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        f"storage.options.endpoint_url=http://me:{PLANTED}@host:9000",
        f"storage.root=s3://me:{PLANTED}@bucket/x",
        f"sglang.api_key={PLANTED}",
    ],
)
def test_a_secret_in_an_address_or_for_an_engine_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"holds? a|is a secret") as caught:
        load_config(QUICKSTART, [setting, "rollout.engine=sglang"])
    assert PLANTED not in str(caught.value)


def test_what_is_no_secret_is_taken() -> None:
    plain = ["endpoint_url=http://host:9000", "region_name=eu", "use_ssl=true", "max_concurrency=4"]
    config = load_config(QUICKSTART, [f"storage.options.{one}" for one in plain])
    assert config.storage.options["region_name"] == "eu"
    sglang = ["sglang.max_total_tokens=1000", "sglang.tokenizer_mode=auto"]
    load_config(QUICKSTART, [*sglang, "rollout.engine=sglang", "cluster.device=cuda"])


@pytest.mark.parametrize(
    "value", [{"key": "me", "secret": PLANTED}, {"aws_secret_access_key": PLANTED}]
)
def test_a_block_gives_credentials_that_are_written_nowhere(
    value: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_given", {})
    sets = [f"storage.root={tmp_path}/root", "run.id=x", "storage.credentials_block=my-store"]
    config = load_config(QUICKSTART, sets)
    with prefect_test_harness():
        Secret(value=value).save("my-store")
        asyncio.run(fetch_credentials(config.storage))
    store = open_store(config)
    create_or_check(store, config, {})
    plan = rollout_plan(FleetPlan(config, store, 1, tmp_path))
    # Actors get them as arguments, and neither they nor the store show them.
    assert plan.options["secret"] == PLANTED
    assert pickle.loads(pickle.dumps(store.objects))._options["secret"] == PLANTED
    assert PLANTED not in repr(plan) + repr(store.objects)
    for path in (tmp_path / "root").rglob("*"):
        assert path.is_dir() or PLANTED.encode() not in path.read_bytes()
    record = json.loads((tmp_path / "root" / "runs" / "x" / "run.json").read_text())
    assert record["config"]["storage"]["credentials_block"] == "my-store"


def test_a_block_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_given", {})
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    storage = StorageConfig(credentials_block="nowhere")
    asyncio.run(fetch_credentials(storage))
    with pytest.raises(ConfigError, match=r"credentials_block = 'nowhere' .* PREFECT_API_URL"):
        credentials.all_options(storage)
    with prefect_test_harness():
        with pytest.raises(ConfigError, match="Prefect has no block secret/nowhere"):
            asyncio.run(fetch_credentials(storage))
        Secret(value="no object").save("plain")
        with pytest.raises(ConfigError, match="holds no credentials"):
            asyncio.run(fetch_credentials(StorageConfig(credentials_block="plain")))


def test_errors_of_the_store_do_not_show_its_credentials() -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "me", "secret": PLANTED}
    objects = Objects.open("s3://bucket/x", options, retry_s=0.1)
    with pytest.raises(OSError) as caught:
        objects.get("k")
    assert PLANTED not in str(caught.value) + repr(caught.value) + repr(objects)


def test_a_stored_configuration_with_an_option_of_old_still_says_what_is_wrong() -> None:
    tree = load_config(QUICKSTART).model_dump()
    tree["storage"]["options"] = {"secret": PLANTED}
    with pytest.raises(ConfigError, match="is a secret"):
        build_config(tree)
