"""Modes: what each needs and has, and that old runs keep their digests."""

from typing import Any

import pytest

from rlcore.config import RunConfig, build_config, config_digest
from rlcore.config.digest import tree_digest
from rlcore.errors import ConfigError


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
    }
    return build_config(base | sections)


SFT: dict[str, Any] = {
    "run": {"mode": "sft"},
    "algorithm": {"loss_type": "sft_loss"},
    "rollout": {"n_samples_per_prompt": 1, "rollout_batch_size": 256, "context_length": 64},
}


def test_who_trains_and_who_generates() -> None:
    found = {
        mode: (made.trains, made.generates)
        for mode, made in {
            "sync": config(),
            "async": config(run={"mode": "async"}),
            "fully-async": config(run={"mode": "fully-async"}),
            "debug-rollout-only": config(run={"mode": "debug-rollout-only"}),
            "debug-train-only": config(run={"mode": "debug-train-only", "train_from": "a"}),
            "sft": config(**SFT),
        }.items()
    }
    assert found == {
        "sync": (True, True),
        "async": (True, True),
        "fully-async": (True, True),
        "debug-rollout-only": (False, True),
        "debug-train-only": (True, False),
        "sft": (True, False),
    }


def test_the_batches_of_learned_rows_may_be_trained_on_again() -> None:
    again = SFT | {"run": {"mode": "debug-train-only", "train_from": "a"}}
    made = config(**again, data={"path": "/d", "response_key": "r"}, reward={"rm_type": "none"})
    assert (made.reward.rm_type, made.algorithm.loss_type) == ("none", "sft_loss")


@pytest.mark.parametrize("run", [{"mode": "debug-train-only"}, {"train_from": "a"}])
def test_training_alone_names_its_batches(run: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"run\.train_from, .* belong together"):
        config(run=run)


def test_a_run_without_these_settings_keeps_its_digest() -> None:
    tree = config().model_dump(mode="json")
    for key in ("async_buffer_size", "update_weights_interval", "max_staleness"):
        del tree["rollout"][key]
    del tree["run"]["train_from"], tree["data"]["response_key"], tree["algorithm"]["loss_type"]
    assert tree_digest(tree) == config_digest(config())


def test_learning_a_data_set_needs_no_reward() -> None:
    tree = {"model": {"path": "/m"}, "data": {"path": "/d.jsonl"}} | SFT
    assert build_config(tree).reward.rm_type == "none"
    assert config(**SFT).reward.custom_rm_path == "mine:reward"
    assert not config(**SFT).algorithm.group_baseline
    with pytest.raises(ConfigError, match=r"is for run.mode = 'sft' alone; give exactly one of"):
        config(reward={"rm_type": "none"})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {}}, "algorithm.loss_type = 'policy_loss', .* = 'sft_loss'"),
        ({"rollout": {"n_samples_per_prompt": 8}}, "set rollout.n_samples_per_prompt = 1"),
        ({"rollout": SFT["rollout"] | {"temperature": 0.7}}, "set rollout.temperature = 1.0"),
        ({"data": {"path": "/d", "max_prompt_len": 9}}, "max_prompt_len is set, .*generates noth"),
        (
            {"rollout": SFT["rollout"] | {"over_sampling_batch_size": 512}},
            "rollout.over_sampling_batch_size is set, but run.mode = 'sft' generates nothing",
        ),
        *(
            ({"rollout": SFT["rollout"] | {key: "mine:f"}}, f"rollout.{key} is set, .* generates")
            for key in (
                "data_source_path",
                "buffer_filter_path",
                "rollout_sample_filter_path",
                "rollout_all_samples_process_path",
            )
        ),
        *(
            (
                {"algorithm": {"loss_type": "sft_loss", key: "mine:f"}},
                f"algorithm.{key} = 'mine:f' is about the policy loss",
            )
            for key in (
                "custom_reward_post_process_path",
                "custom_advantage_function_path",
                "custom_pg_loss_reducer_function_path",
                "custom_loss_function_path",
            )
        ),
        (
            {"weights": {"custom_update_weight_post_write_path": "mine:f"}},
            "weights.custom_update_weight_post_write_path is set, .* generates nothing",
        ),
        (
            {"algorithm": {"loss_type": "sft_loss", "use_kl_loss": True}},
            "algorithm.use_kl_loss = True is about the policy loss",
        ),
        ({"run": {}, "data": {"path": "/d", "response_key": "r"}}, "is for run.mode = 'sft'"),
    ],
)
def test_what_learning_a_data_set_has_no_use_for(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**SFT | sections)


ASYNC: dict[str, Any] = {"run": {"mode": "async"}}


def test_old_samples_are_weighed_unless_something_else_is_said() -> None:
    assert config(**ASYNC).algorithm.use_tis
    assert not config(**ASYNC, algorithm={"use_tis": False}).algorithm.use_tis
    other = config(**ASYNC, algorithm={"use_rollout_logprobs": True}).algorithm
    assert other.use_rollout_logprobs and not other.use_tis
    assert not config().algorithm.use_tis
    assert config().max_staleness is None
    assert not config(**ASYNC, algorithm={"loss_type": "sft_loss"}).algorithm.use_tis


ENDLESS: dict[str, Any] = {"run": {"mode": "fully-async"}}


def test_which_policies_generation_without_end_has() -> None:
    made = config(**ENDLESS, rollout={"async_buffer_size": 2, "update_weights_interval": 3})
    assert [made.policy_version(i) for i in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert made.algorithm.use_tis and made.is_async and made.is_fully_async
    assert (made.lag, made.max_staleness) == (5, 5)
    assert config(**ENDLESS, rollout={"max_staleness": 1}).max_staleness == 1
    assert not config(**ASYNC).is_fully_async


EVAL = {"eval_interval": 3, "datasets": [{"name": "a", "path": "/a"}]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (ASYNC | {"cluster": {"colocate": True}}, "cannot share GPUs"),
        (ASYNC | {"rollout": {"async_buffer_size": 2, "max_staleness": 1}}, "up to 2 iterations"),
        (ASYNC | {"rollout": {"update_weights_interval": 2}, "eval": EVAL}, "is no multiple of"),
        (
            ASYNC | {"algorithm": {"true_on_policy_mode": True, "use_tis": False}},
            "not the one that sampled with run.mode = 'async'",
        ),
        ({"rollout": {"async_buffer_size": 2}}, "async_buffer_size = 2 is for run.mode = 'async'"),
        (
            {"rollout": {"update_weights_interval": 2}},
            "is for run.mode = 'async' and 'fully-async' alone",
        ),
        (ENDLESS | {"cluster": {"colocate": True}}, "cannot share GPUs"),
        (ENDLESS | {"rollout": {"max_staleness": 0}}, "samples that are up to 1 iterations old"),
        (
            ENDLESS | {"rollout": {"over_sampling_batch_size": 64}},
            "over_sampling_batch_size is about rollouts that begin and end",
        ),
        (ENDLESS | {"rollout": {"data_source_path": "a:B"}}, "data_source_path is about"),
        ({"rollout": {"max_staleness": 2}}, "no token is ever of an older policy"),
    ],
)
def test_what_rollouts_ahead_do_not_go_with(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**sections)
