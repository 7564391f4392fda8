"""The reward section: one function, what each type needs, and no secrets."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlcore.config.digest import config_digest, is_operational
from rlcore.config.load import build_config, resolve_paths, with_sets
from rlcore.config.tree import RewardConfig, RunConfig
from rlcore.errors import ConfigError

JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "j"}


def config(**reward: Any) -> RunConfig:
    return build_config({"model": {"path": "/m"}, "data": {"path": "/d"}, "reward": reward})


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({}, "give exactly one of reward.rm_type and reward.custom_rm_path"),
        ({"rm_type": "math", "custom_rm_path": "a:b"}, 'exactly one of.*set the other to ""'),
        ({"rm_type": "maths"}, "reward.rm_type = 'maths': there is no reward type.*'math'"),
        ({"rm_type": "boxed_boxed_math"}, "there is no reward type"),
        ({"rm_type": "math", "batched": True}, "reward.batched = true needs reward.custom_rm_path"),
        ({"rm_type": "remote_rm"}, "needs reward.rm_url"),
        ({"rm_type": "boxed_remote_rm"}, "needs reward.rm_url"),
        ({"rm_type": "remote_rm", "rm_url": "ftp://x"}, "reward.rm_url = 'ftp://x'"),
        ({"rm_type": "judge"}, r"needs the table \[reward.judge\]"),
        ({"rm_type": "judge", "judge": {"url": "http://x"}}, "reward.judge.model is missing"),
        ({"rm_type": "judge", "judge": JUDGE | {"modle": "x"}}, "reward.judge.modle"),
        ({"rm_type": "judge", "judge": JUDGE | {"prompt": "{label}"}}, "has no {response}"),
        ({"rm_type": "judge", "judge": JUDGE | {"score_pattern": "("}}, "no regular expression"),
        ({"rm_type": "judge", "judge": JUDGE | {"score_pattern": "x"}}, "no group"),
        ({"rm_type": "judge", "judge": JUDGE | {"min_score": 2.0}}, "not below max_score"),
        ({"rm_type": "judge", "judge": JUDGE | {"key_env": "sk-123"}}, "reward.judge.key_env"),
    ],
)
def test_what_cannot_be_is_told(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**reward)


@pytest.mark.parametrize(
    "url",
    ["http://me:hidden@h/score", "http://h/score?api_key=hidden", "http://h/?a=1&token=hidden"],
)
def test_addresses_hold_no_secret(url: str) -> None:
    for reward in (
        {"rm_type": "remote_rm", "rm_url": url},
        {"rm_type": "judge", "judge": JUDGE | {"url": url}},
    ):
        with pytest.raises(ConfigError, match="holds a password or key") as caught:
            config(**reward)
        assert "hidden" not in str(caught.value)


def test_a_type_knows_its_key() -> None:
    assert RewardConfig(rm_type="boxed_dapo").reward_key == "score"
    assert RewardConfig(rm_type="judge", judge=JUDGE).reward_key == "score"  # type: ignore[arg-type]
    assert RewardConfig(rm_type="dapo", reward_key="acc").reward_key == "acc"
    assert RewardConfig(rm_type="math").reward_key is None
    with pytest.raises(ValidationError):
        RewardConfig(rm_type=3)  # type: ignore[arg-type]


def test_one_is_exchanged_for_the_other() -> None:
    old = config(custom_rm_path="a:b")
    new = with_sets(old, ["reward.rm_type=math", "reward.custom_rm_path="])
    assert (new.reward.rm_type, new.reward.custom_rm_path) == ("math", "")
    back = with_sets(new, ['reward.rm_type=""', "reward.custom_rm_path=a:b"])
    assert back == old


def test_how_requests_are_sent_may_change_in_a_run() -> None:
    one = config(rm_type="remote_rm", rm_url="http://h")
    for key in ("workers", "concurrency", "retries", "request_timeout_s"):
        assert is_operational(one, "reward", key)
    for key in ("rm_type", "rm_url", "judge", "timeout_s"):
        assert not is_operational(one, "reward", key)


def test_a_server_may_move_in_a_run() -> None:
    one, two = (config(rm_type="remote_rm", rm_url=f"http://h{n}/score") for n in (1, 2))
    assert config_digest(one) == config_digest(two)
    assert config_digest(one) != config_digest(config(rm_type="remote_rm", rm_url="http://h1/x"))
    three, four = (
        config(rm_type="judge", judge=JUDGE | {"url": f"http://h{n}/v1"}) for n in (3, 4)
    )
    assert config_digest(three) == config_digest(four)
    assert config_digest(three) != config_digest(
        config(rm_type="judge", judge=JUDGE | {"model": "k"})
    )
    assert resolve_paths({"reward": {"rm_url": "h:80"}}, RunConfig, Path("/x")) == {
        "reward": {"rm_url": "h:80"}
    }
