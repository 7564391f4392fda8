"""Settings that could do nothing of what they say are refused, with what would mend it."""

from typing import Any

import pytest

from rlcore.config import RunConfig, build_config
from rlcore.errors import ConfigError

Tree = dict[str, Any]
ONE_EACH = {"n_samples_per_prompt": 1, "rollout_batch_size": 256}
SFT: Tree = {"run": {"mode": "sft"}, "algorithm": {"loss_type": "sft_loss"}}
ALONE = {"advantage_estimator": "reinforce_plus_plus"}


def built(**sections: Any) -> RunConfig:
    """The smallest valid configuration with `sections` laid over it."""
    base: Tree = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return build_config(base)


def held_out(**settings: Any) -> Tree:
    """The section `eval` with one data set."""
    return {"datasets": [{"name": "a", "path": "/a.jsonl", **settings}]}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"algorithm": {"kl_loss_coef": 0.01}},
            ("algorithm.kl_loss_coef = 0.01", "algorithm.use_kl_loss = false", "at 0.001"),
        ),
        ({"algorithm": {"kl_loss_type": "k1"}}, ("algorithm.kl_loss_type = 'k1'", "at 'k3'")),
        ({"algorithm": {"opsm_delta": 0.1}}, ("algorithm.opsm_delta", "algorithm.use_opsm")),
        ({"algorithm": {"opd_kl_coef": 0.1}}, ("algorithm.opd_kl_coef", "algorithm.use_opd")),
        ({"algorithm": {"tis_mode": "mask"}}, ("algorithm.tis_mode", "algorithm.use_tis")),
        (
            {
                "algorithm": {"use_rollout_logprobs": True, "tis_clip": 3.0},
                "run": {"mode": "async"},
            },
            ("algorithm.tis_clip = 3.0", "algorithm.use_tis = false"),
        ),
        (
            {"train": {"use_routing_replay": True}, "algorithm": {"loss_type": "sft_loss"}},
            ("train.use_routing_replay = true", "algorithm.loss_type = 'sft_loss'"),
        ),
        (
            SFT | {"rollout": ONE_EACH | {"use_rollout_routing_replay": True}},
            ("rollout.use_rollout_routing_replay = true", "run.mode = 'sft' has none"),
        ),
        ({"train": {"lr_min": 1e-7}}, ("train.lr_min = 1e-07", "train.lr_schedule = 'constant'")),
        (
            {"rollout": {"top_k": 1}},
            ("rollout.top_k = 1 gives the same response", "2 and up"),
        ),
        (
            {"rollout": ONE_EACH | {"temperature": 0.0}, "algorithm": ALONE},
            ("rollout.temperature = 0", "the trainer divides", "'debug-rollout-only'"),
        ),
        (
            {
                "rollout": ONE_EACH,
                "algorithm": ALONE,
                "filter": {"dynamic_sampling_filter_path": "nonzero_std"},
            },
            ("'nonzero_std' drops", "rollout.n_samples_per_prompt = 1", "every group"),
        ),
        (
            {"rollout": {"buffer_filter_path": "a.py:b"}},
            ("rollout.buffer_filter_path is set", "nothing is ever left over"),
        ),
        (
            {"rollout": {"use_sglang_router": True, "sglang_router_url": "http://a:1"}},
            ("rollout.use_sglang_router", "rollout.sglang_router_url", "one of them"),
        ),
        ({"rollout": {"stop": ["\n", ""]}}, ("rollout.stop.1 = ''", "not empty")),
        (
            {"rollout": {"num_engines": 2}},
            ("rollout.num_engines = 2", "tokens a GPU", "set that to 2"),
        ),
        (
            {"cluster": {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}},
            ("cluster.rollout_num_gpus_per_engine = 2", "'embedded' does not", "leave it at 1"),
        ),
        (
            {"rollout": {"engine": "sglang"}, "sglang": {"page-size": 1, "page_size": 2}},
            ("sglang.page-size and sglang.page_size", "one argument"),
        ),
        ({"data": {"weight": 2.0}}, ("data.weight = 2.0", "data.mix")),
        (
            {"data": {"apply_chat_template_kwargs": {"enable_thinking": False}}},
            ("data.apply_chat_template_kwargs", "data.apply_chat_template = true"),
        ),
        (
            {"reward": {"request_timeout_s": 31.0}},
            ("reward.request_timeout_s = 31.0", "reward.timeout_s = 30.0"),
        ),
        (
            {"weights": {"delta_base_interval": 5}},
            ("weights.delta_base_interval = 5", "'delta'", "at 20"),
        ),
        (
            {"tracking": {"tensorboard_dir": "/boards"}},
            ("tracking.tensorboard_dir", "tracking.tensorboard = true"),
        ),
        ({"eval": held_out(top_k=0)}, ("top_k = 0 of eval.datasets 'a'", "no token")),
        (
            {"eval": held_out(top_k=1, temperature=1.0, n_samples_per_eval_prompt=4)},
            ("top_k = 1 of eval.datasets 'a'", "n_samples_per_eval_prompt = 4 times"),
        ),
        (
            {"eval": held_out(top_p=0.9)},
            ("top_p = 0.9 of eval.datasets 'a'", "set a temperature above 0"),
        ),
        (
            {
                "eval": held_out(max_response_len=64),
                "rollout": {"context_length": 64, "max_response_len": 32},
            },
            ("rollout.context_length = 64", "max_response_len = 64 of eval.datasets 'a'"),
        ),
        (
            {"eval": held_out(max_response_len=8, min_new_tokens=9)},
            ("min_new_tokens = 9 of eval.datasets 'a'", "max_response_len"),
        ),
        (
            {
                "eval": held_out(rm_type="maths"),
                "reward": {"custom_rm_path": "", "rm_type": "math"},
            },
            ("rm_type of eval.datasets 'a' = 'maths'", "math"),
        ),
    ],
)
def test_it_is_refused(sections: Tree, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        built(**sections)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k1"}},
        {"algorithm": ALONE | {"kl_coef": 0.1, "kl_loss_type": "k1"}},
        {"algorithm": {"tis_clip": 3.0}, "run": {"mode": "async"}},
        {"algorithm": {"custom_loss_function_path": "m.f", "kl_loss_coef": 0.1}},
        {"train": {"lr_warmup_steps": 100}},
        {"train": {"lr_schedule": "linear", "lr_min": 1e-7, "lr_warmup_steps": 100}},
        {
            "run": {"mode": "debug-rollout-only"},
            "rollout": ONE_EACH | {"temperature": 0.0},
            "algorithm": ALONE,
        },
        {"rollout": {"buffer_filter_path": "a.py:b", "over_sampling_batch_size": 64}},
        {"rollout": {"num_engines": 2}, "cluster": {"rollout_num_gpus": 2}},
        {"data": {"weight": 2.0, "mix": [{"path": "/b.jsonl"}]}},
        {
            "data": {"apply_chat_template_kwargs": {"enable_thinking": False}},
            "eval": held_out(apply_chat_template=True),
        },
        {
            "data": {"apply_chat_template_kwargs": {"enable_thinking": False}},
            "rollout": {"custom_generate_function_path": "a.py:b"},
        },
        {"eval": held_out(top_p=0.9, temperature=0.0)},
        {"eval": held_out(rm_type="maths")},
        {
            "eval": held_out(n_samples_per_eval_prompt=4),
            "rollout": {"custom_generate_function_path": "a.py:b"},
        },
    ],
)
def test_what_has_an_effect_is_taken_and_stored(sections: Tree) -> None:
    config = built(**sections)
    assert build_config(config.model_dump()) == config
