"""Sizes and arguments of engines: what is refused, in which words, and what follows."""

from typing import Any

import pytest

from rlcore.config import build_config
from rlcore.config.engines import tensor_parallel
from rlcore.errors import ConfigError


def config(sglang: dict[str, Any] | None = None, gpus: int = 1, each: int = 1, **more: Any) -> Any:
    """A configuration with engines of SGLang."""
    tree: dict[str, Any] = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
        "rollout": {"engine": "sglang"},
        "cluster": {"rollout_num_gpus": gpus, "rollout_num_gpus_per_engine": each},
        "sglang": sglang or {},
    }
    for name, section in more.items():
        tree[name] = tree.get(name, {}) | section
    return build_config(tree)


@pytest.mark.parametrize(
    ("sglang", "each", "size"),
    [
        ({}, 4, 4),
        ({"pp_size": 2}, 8, 4),
        ({"pipeline-parallel-size": 2}, 8, 4),
        ({"dp_size": 4, "enable_dp_attention": True, "ep_size": 8}, 8, 8),
        ({"ep_size": 2}, 2, 2),
    ],
)
def test_an_engine_s_gpus_are_tensor_times_pipeline_parallel(
    sglang: dict[str, Any], each: int, size: int
) -> None:
    assert tensor_parallel(config(sglang, each, each)) == size


@pytest.mark.parametrize(
    ("sglang", "more", "words"),
    [
        ({"pp_size": 3}, {}, ("sglang.pp_size = 3", "cluster.rollout_num_gpus_per_engine = 4")),
        ({"pp_size": "2"}, {}, ("sglang.pp_size = '2'", "number of GPUs")),
        (
            {"pp_size": 2},
            {"weights": {"transport": "distributed"}},
            ("sglang.pp_size = 2", "'distributed'", "use 'disk'"),
        ),
        ({"dp_size": 2}, {}, ("sglang.dp_size = 2", "sglang.enable_dp_attention = true")),
        ({"ep_size": 8}, {}, ("sglang.ep_size = 8", "the 4 GPUs")),
        (
            {"dp-size": 3, "enable_dp_attention": True},
            {},
            ("sglang.dp_size = 3", "does not divide the 4 GPUs"),
        ),
        ({"tp-size": 4}, {}, ("sglang.tp-size", "cluster.rollout_num_gpus_per_engine")),
        ({"context_length": 9}, {}, ("sglang.context_length", "set rollout.context_length")),
        ({"nnodes": 2}, {}, ("sglang.nnodes", "remove it")),
        ({"api_key": "x"}, {}, ("sglang.api_key", "secret")),
        (
            {"speculative-algorithm": "EAGLE3"},
            {"weights": {"transport": "disk"}},
            ("sglang.speculative_algorithm = 'EAGLE3'", "'disk'", "use 'tensor'"),
        ),
        (
            {},
            {"rollout": {"engine_urls": ["http://a:1", "http://b:2"]}},
            ("rollout.engine_urls has 2 engines", "8 GPUs", "cluster.rollout_num_gpus = 4"),
        ),
        (
            {"page_size": 16},
            {"rollout": {"engine_urls": ["http://a:1"]}},
            ("sglang.page_size", "rollout.engine_urls", "remove it"),
        ),
        (
            {},
            {"rollout": {"engine_urls": ["http://a:1"]}, "cluster": {"colocate": True}},
            ("cluster.colocate", "rollout.engine_urls"),
        ),
        (
            {},
            {"rollout": {"engine_urls": ["http://a:1"]}, "run": {"mode": "debug-rollout-only"}},
            ("rollout.engine_urls", "'debug-rollout-only'", "no trainer"),
        ),
        (
            {},
            {"rollout": {"engine_urls": ["http://a:1", "http://a:1"]}},
            ("names an engine twice", "http://a:1"),
        ),
        (
            {},
            {"rollout": {"num_engines": 3}},
            ("rollout.num_engines = 3", "12 GPUs", "cluster.rollout_num_gpus = 4"),
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(
    sglang: dict[str, Any], more: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(sglang, 4, 4, **more)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_argument_may_have_several_values() -> None:
    graphs = {"cuda_graph_bs_decode": [8, 64, 512]}
    assert config(graphs).sglang == graphs


def test_a_policy_that_is_never_trained_is_refused() -> None:
    critic = {"advantage_estimator": "ppo", "num_critic_only_steps": 5}
    assert config(algorithm=critic, train={"num_iterations": 6})
    with pytest.raises(ConfigError, match="never be trained"):
        config(algorithm=critic, train={"num_iterations": 5})


def test_greedy_samples_of_one_prompt_are_refused_in_evaluations() -> None:
    def held_out(**settings: Any) -> Any:
        return config(eval={"datasets": [{"name": "a", "path": "/a.jsonl", **settings}]})

    assert held_out(n_samples_per_eval_prompt=4, temperature=0.6)
    with pytest.raises(ConfigError, match="same response n_samples_per_eval_prompt = 4 times"):
        held_out(n_samples_per_eval_prompt=4)
