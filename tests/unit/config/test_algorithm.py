"""The section `algorithm`: what goes together, and what follows from it."""

from typing import Any

import pytest

from rlcore.config import AlgorithmConfig, RunConfig, build_config
from rlcore.errors import ConfigError


def built(algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    return build_config(
        {
            "model": {"path": "/model"},
            "data": {"path": "/train.jsonl"},
            "reward": {"custom_rm_path": "mine:reward"},
            "algorithm": algorithm,
            **sections,
        }
    )


TWO_STEPS = {"train": {"num_steps_per_rollout": 2, "global_batch_size": 128}}


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"advantage_estimator": "dpo"}, ("algorithm.advantage_estimator = 'dpo'", "'cispo'")),
        ({"lambd": 0.95}, ("algorithm.lambd = 0.95", "critic of 'ppo'")),
        ({"num_critic_only_steps": 1}, ("algorithm.num_critic_only_steps = 1", "'grpo' has none")),
        (
            {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False},
            ("'reinforce_plus_plus' needs whitened", "algorithm.normalize_advantages"),
        ),
        ({"kl_coef": 0.1}, ("algorithm.kl_coef = 0.1", "algorithm.use_kl_loss = true")),
        ({"gamma": 0.9}, ("algorithm.gamma = 0.9", "'grpo' has none")),
        (
            {"advantage_estimator": "cispo", "eps_clip_c": 3.0},
            ("algorithm.eps_clip_c", "no dual clip"),
        ),
        ({"eps_clip_c": 1.0}, ("algorithm.eps_clip_c = 1.0", "greater than 1")),
        (
            {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "use_kl_loss": True},
            ("algorithm.kl_coef = 0.1", "algorithm.use_kl_loss", "twice"),
        ),
        ({"use_opd": True}, ("algorithm.use_opd", "opd_teacher_load", "rollout.teacher_url")),
        (
            {"custom_tis_function_path": "m.f"},
            ("algorithm.custom_tis_function_path", "algorithm.use_tis = true"),
        ),
        (
            {"custom_loss_function_path": "m.f", "use_tis": True},
            ("algorithm.use_tis", "algorithm.custom_loss_function_path replaces"),
        ),
        (
            {
                "custom_pg_loss_reducer_function_path": "m.f",
                "loss_aggregation": "constant",
                "loss_divisor": 9,
            },
            ("algorithm.loss_divisor", "algorithm.custom_pg_loss_reducer_function_path"),
        ),
        ({"opd_teacher_load": "/t"}, ("algorithm.use_opd", "algorithm.opd_teacher_load")),
        ({"use_unbiased_kl": True}, ("algorithm.use_unbiased_kl", "algorithm.use_kl_loss")),
        ({"loss_aggregation": "constant"}, ("algorithm.loss_divisor", "both or neither")),
        ({"ref_update_interval": 2}, ("algorithm.ref_update_interval = 2", "use_kl_loss = true")),
        ({"loss_divisor": 4096}, ("algorithm.loss_divisor", "both or neither")),
        (
            {"use_tis": True, "use_rollout_logprobs": True},
            ("algorithm.use_tis", "algorithm.use_rollout_logprobs", "use one of them"),
        ),
        (
            {"use_tis": True, "tis_clip_low": 3.0},
            ("algorithm.tis_clip_low = 3.0", "algorithm.tis_clip = 2.0"),
        ),
        (
            {"use_tis": True, "true_on_policy_mode": True},
            ("algorithm.use_tis", "algorithm.true_on_policy_mode"),
        ),
        ({"use_opsm": True}, ("algorithm.use_opsm", "algorithm.use_rollout_logprobs = true")),
    ],
)
def test_contradictions_are_refused(algorithm: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        built(algorithm)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [TWO_STEPS, {"rollout": {"over_sampling_batch_size": 64, "partial_rollout": True}}],
)
def test_on_policy_means_one_step_on_whole_rollouts(sections: dict[str, Any]) -> None:
    assert built({"true_on_policy_mode": True}).algorithm.true_on_policy_mode
    with pytest.raises(ConfigError, match="is not the one that sampled with"):
        built({"true_on_policy_mode": True}, **sections)


def test_sequence_masking_needs_an_old_policy() -> None:
    assert built({"use_opsm": True}, **TWO_STEPS).algorithm.use_opsm
    assert built({"use_opsm": True, "use_rollout_logprobs": True}).algorithm.use_opsm


def test_a_group_of_one_needs_no_baseline_where_rewards_are_not_compared() -> None:
    single = {"rollout": {"n_samples_per_prompt": 1, "rollout_batch_size": 256}}
    assert built({"advantage_estimator": "reinforce_plus_plus"}, **single)
    assert built({"rewards_normalization": False}, **single)
    with pytest.raises(ConfigError, match="'reinforce_plus_plus_baseline': a group of one"):
        built({"advantage_estimator": "reinforce_plus_plus_baseline"}, **single)


@pytest.mark.parametrize(
    ("estimator", "baseline", "std", "whitens"),
    [
        ("grpo", True, True, False),
        ("gspo", True, True, False),
        ("cispo", True, True, False),
        ("reinforce_plus_plus_baseline", True, False, True),
        ("reinforce_plus_plus", False, False, True),
        ("ppo", False, False, False),
    ],
)
def test_what_an_estimator_implies(
    estimator: Any, baseline: bool, std: bool, whitens: bool
) -> None:
    config = AlgorithmConfig(advantage_estimator=estimator)
    assert (config.group_baseline, config.group_std, config.whitens) == (baseline, std, whitens)
    bare = AlgorithmConfig(advantage_estimator=estimator, rewards_normalization=False)
    assert not bare.group_baseline


def test_a_reference_is_made_where_a_divergence_from_it_is_asked_for() -> None:
    assert not AlgorithmConfig().needs_reference
    assert AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.0).needs_reference
    assert AlgorithmConfig(advantage_estimator="reinforce_plus_plus", kl_coef=0.01).needs_reference


def test_functions_of_one_s_own_take_the_place_of_what_they_replace() -> None:
    post = AlgorithmConfig(custom_reward_post_process_path="m.f")
    assert not post.group_baseline and not post.group_std
    single = {"rollout": {"n_samples_per_prompt": 1, "rollout_batch_size": 256}}
    assert built({"custom_reward_post_process_path": "m.f"}, **single)
    assert built({"custom_advantage_function_path": "m.f", "kl_coef": 0.1, "gamma": 0.9})
    for name in ("custom_advantage_function_path", "custom_loss_function_path"):
        assert AlgorithmConfig(**{name: "m.f"}).needs_old_ahead
