"""The strict tree: what is refused, in which words, and what follows from the settings."""

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel

from rlcore.config import RunConfig, build_config
from rlcore.config.tree import Section
from rlcore.errors import ConfigError

Tree = dict[str, Any]


def tree(**sections: Any) -> Tree:
    """The smallest valid configuration with `sections` laid over it."""
    base: Tree = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return base


def refused(**sections: Any) -> str:
    """The text with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        build_config(tree(**sections))
    text = str(caught.value)
    assert "\n" not in text and "pydantic" not in text
    return text


def test_the_smallest_configuration_is_accepted_and_its_batches_add_up() -> None:
    config = build_config(tree())
    made = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    assert made == config.train.global_batch_size * config.train.num_steps_per_rollout


@pytest.mark.parametrize(
    ("sections", "key", "nearest"),
    [
        ({"train": {"learning_rte": 1.0}}, "train.learning_rte", None),
        ({"train": {"num_iteration": 3}}, "train.num_iteration", "train.num_iterations"),
        ({"rollout": {"temprature": 1.0}}, "rollout.temprature", "rollout.temperature"),
        ({"rolout": {}}, "rolout", "rollout"),
        ({"train": {"LR": 1.0}}, "train.LR", "train.lr"),
        ({"train": {"temperature": 1.0}}, "train.temperature", "rollout.temperature"),
        (
            {"eval": {"datasets": [{"name": "a", "path": "/a", "temprature": 0.0}]}},
            "eval.datasets.0.temprature",
            "eval.datasets.0.temperature",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(
    sections: Tree, key: str, nearest: str | None
) -> None:
    text = refused(**sections)
    assert f"unknown setting {key}:" in text
    if nearest:
        assert f"did you mean {nearest}?" in text
    else:
        assert "num_iterations" in text and "lr" in text


@pytest.mark.parametrize(
    ("sections", "key", "value", "allowed"),
    [
        ({"train": {"lr": "fast"}}, "train.lr", "'fast'", "a valid number"),
        ({"train": {"num_iterations": 2.5}}, "train.num_iterations", "2.5", "a valid integer"),
        ({"train": {"num_iterations": "3"}}, "train.num_iterations", "'3'", "a valid integer"),
        ({"train": {"num_iterations": True}}, "train.num_iterations", "True", "a valid integer"),
        ({"data": {"shuffle": "yes"}}, "data.shuffle", "'yes'", "a valid boolean"),
        ({"rollout": {"stop": "###"}}, "rollout.stop", "'###'", "a valid list"),
        ({"rollout": 7}, "rollout", "7", "a table"),
        (
            {"train": {"num_iterations": 0}},
            "train.num_iterations",
            "0",
            "greater than or equal to 1",
        ),
        ({"rollout": {"top_p": 1.5}}, "rollout.top_p", "1.5", "less than or equal to 1"),
        ({"rollout": {"top_p": 0.0}}, "rollout.top_p", "0.0", "greater than 0"),
        ({"rollout": {"temperature": -1.0}}, "rollout.temperature", "-1.0", "greater than"),
        ({"rollout": {"temperature": float("inf")}}, "rollout.temperature", "inf", "finite"),
        ({"train": {"lr": float("nan")}}, "train.lr", "nan", "finite"),
        ({"train": {"lr": float("inf")}}, "train.lr", "inf", "finite"),
        ({"train": {"backend": "fsdp2"}}, "train.backend", "'fsdp2'", "'fsdp' or 'megatron'"),
        ({"rollout": {"engine": "vllm"}}, "rollout.engine", "'vllm'", "'embedded' or 'sglang'"),
        ({"run": {"id": "My Run"}}, "run.id", "'My Run'", "text that matches"),
        ({"data": {"path": ""}}, "data.path", "''", "not empty"),
        (
            {"rollout": {"engine": "sglang"}, "sglang": {"page_size": {"a": 1}}},
            "sglang.page_size",
            "{'a': 1}",
            "a valid boolean or a valid integer",
        ),
        (
            {"filter": {"dynamic_sampling_filter_path": 3}},
            "filter.dynamic_sampling_filter_path",
            "3",
            "'nonzero_std'",
        ),
        ({"rollout": {"stop_token_ids": [1, "a"]}}, "rollout.stop_token_ids.1", "'a'", "integer"),
        ({"run": {"seed": 2**31}}, "run.seed", "2147483648", "less than"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    sections: Tree, key: str, value: str, allowed: str
) -> None:
    text = refused(**sections)
    assert f"{key} = {value} is not allowed" in text
    assert allowed in text


def test_a_missing_setting_is_named_with_what_it_is_for() -> None:
    bare = tree()
    del bare["data"], bare["reward"]["custom_rm_path"]
    with pytest.raises(ConfigError) as caught:
        build_config(bare)
    assert "data is missing: the prompts to train on" in str(caught.value)
    assert "give exactly one of reward.rm_type and reward.custom_rm_path" in str(caught.value)


def test_every_fault_is_told_at_once() -> None:
    text = refused(train={"lr": "x", "num_iteration": 1}, rollout={"top_p": 2.0})
    assert all(key in text for key in ("train.lr", "train.num_iteration", "rollout.top_p"))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"train": {"global_batch_size": 100}},
            ("rollout_batch_size", "n_samples_per_prompt", "256", "global_batch_size", "100"),
        ),
        (
            {"train": {"global_batch_size": 64, "num_steps_per_rollout": 2}},
            ("num_steps_per_rollout", "64 x 2 = 128", "train.global_batch_size = 128"),
        ),
        (
            {"train": {"global_batch_size": 85, "num_steps_per_rollout": 3}},
            ("255", "256 must be a multiple of train.num_steps_per_rollout"),
        ),
        (
            {"rollout": {"over_sampling_batch_size": 31}},
            ("over_sampling_batch_size = 31 is less than", "rollout_batch_size = 32"),
        ),
        (
            {"rollout": {"partial_rollout": True}},
            ("partial_rollout = true, but nothing", "over_sampling_batch_size above", "= 32"),
        ),
        (
            {"rollout": {"partial_rollout": True, "over_sampling_batch_size": 32}},
            ("partial_rollout = true, but nothing", "rollout_batch_size = 32"),
        ),
        (
            {"rollout": {"mask_offpolicy_in_partial_rollout": True}},
            ("mask_offpolicy_in_partial_rollout = true needs", "partial_rollout = true"),
        ),
        (
            {"rollout": {"n_samples_per_prompt": 1, "rollout_batch_size": 256}},
            ("rollout.n_samples_per_prompt = 1", "algorithm.advantage_estimator", "2 or more"),
        ),
        ({"rollout": {"temperature": 0.0}}, ("rollout.temperature = 0", "above 0")),
        ({"rollout": {"top_k": 0}}, ("rollout.top_k = 0", "-1 (off)")),
        (
            {"rollout": {"context_length": 8, "max_response_len": 8}},
            ("rollout.context_length = 8", "rollout.max_response_len = 8"),
        ),
        (
            {"train": {"lr": 0.1, "lr_min": 0.2, "lr_schedule": "cosine"}},
            ("train.lr_min = 0.2", "train.lr = 0.1"),
        ),
        ({"model": {"build": "a.py:b"}}, ("exactly one of model.path and model.build",)),
        ({"model": {"path": ""}}, ("exactly one of model.path and model.build",)),
        ({"eval": {"eval_interval": 5}}, ("eval.eval_interval", "eval.datasets is empty")),
        (
            {"eval": {"datasets": [{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}]}},
            ("eval.datasets", "two entries of one name"),
        ),
        (
            {"rollout": {"partial_rollout": True, "over_sampling_batch_size": 32}},
            ("rollout.partial_rollout = true", "above rollout.rollout_batch_size = 32"),
        ),
        (
            {
                "rollout": {"over_sampling_batch_size": 32},
                "filter": {"dynamic_sampling_filter_path": "nonzero_std_with_fallback"},
            },
            ("'nonzero_std_with_fallback'", "rollout.over_sampling_batch_size above"),
        ),
        (
            {"rollout": {"group_generate": True}},
            ("rollout.group_generate", "rollout.custom_generate_function_path"),
        ),
        (
            {
                "rollout": {
                    "custom_rollout_function_path": "a.py:b",
                    "over_sampling_batch_size": 64,
                }
            },
            ("rollout.custom_rollout_function_path", "rollout.over_sampling_batch_size"),
        ),
        (
            {
                "rollout": {
                    "custom_rollout_function_path": "a.py:b",
                    "rollout_sample_filter_path": "a.py:c",
                }
            },
            ("rollout.custom_rollout_function_path", "rollout.rollout_sample_filter_path"),
        ),
        ({"megatron": {"sequence_parallel": True}}, ("megatron.sequence_parallel", "'fsdp'")),
        ({"sglang": {"mem_fraction_static": 0.8}}, ("sglang.mem_fraction_static", "embedded")),
        (
            {"cluster": {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}},
            ("cluster.rollout_num_gpus = 3", "rollout_num_gpus_per_engine = 2"),
        ),
    ],
)
def test_a_contradiction_names_both_sides(sections: Tree, words: tuple[str, ...]) -> None:
    text = refused(**sections)
    assert all(word in text for word in words), text


def test_partial_rollouts_need_something_that_is_left_over() -> None:
    dynamic = {"dynamic_sampling_filter_path": "nonzero_std"}
    rollout = {"partial_rollout": True, "over_sampling_batch_size": 32}
    assert build_config(tree(rollout=rollout, filter=dynamic)).rollout.partial_rollout
    own = {"partial_rollout": True, "custom_rollout_function_path": "a.py:b"}
    assert build_config(tree(rollout=own)).rollout.partial_rollout


def test_a_section_cannot_be_changed_afterwards() -> None:
    config = build_config(tree())
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_whole_numbers_do_for_fractions() -> None:
    assert build_config(tree(rollout={"temperature": 1})).rollout.temperature == 1.0


def test_an_interval_is_due_at_its_multiples_and_where_asked_at_the_end() -> None:
    config = build_config(tree(train={"num_iterations": 7}))

    def due(interval: int | None, last: bool) -> list[int]:
        return [i for i in range(7) if config.due(interval, i, last=last)]

    assert due(3, last=False) == [2, 5]
    assert due(3, last=True) == [2, 5, 6]
    assert due(None, last=False) == []
    assert due(None, last=True) == [6]


def test_sizes_follow_from_the_sections() -> None:
    cluster = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "actor_num_nodes": 2}
    rollout = {"engine": "sglang"}
    config = build_config(tree(cluster=cluster, rollout=rollout, train={"num_iterations": 5}))
    assert (config.num_engines, config.world_size, config.total_steps) == (2, 2, 5)
    assert build_config(tree(cluster={"rollout_num_gpus": 3})).num_engines == 3


def test_the_canary_is_strict_only_where_both_sides_compute_in_float32() -> None:
    def tolerance(**sections: Any) -> float:
        return build_config(tree(**sections)).canary_tolerance

    assert tolerance() == 1e-4
    assert tolerance(train={"precision": "bfloat16"}) == 0.3
    assert tolerance(rollout={"engine": "sglang"}) == 0.3
    assert tolerance(weights={"canary_tolerance": 0.5}) == 0.5


def test_every_field_has_its_help_text() -> None:
    def undescribed(section: type[BaseModel]) -> list[str]:
        return [key for key, field in section.model_fields.items() if not field.description]

    sections = Section.__subclasses__()
    assert RunConfig in sections and len(sections) > 10
    assert {section.__name__: undescribed(section) for section in sections} == {
        section.__name__: [] for section in sections
    }


def test_the_schema_is_plain_json_and_closed() -> None:
    schema = json.loads(json.dumps(RunConfig.model_json_schema()))
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "data", "reward"]
    assert all(s["additionalProperties"] is False for s in schema["$defs"].values())


def test_a_configuration_survives_json() -> None:
    config = build_config(tree(eval={"datasets": [{"name": "a", "path": "/a"}]}, run={"id": "r1"}))
    assert build_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"images": "pics"}, "images = 'pics': kinds of media are image, .* did you mean image?"),
        ({"picture": "p"}, "picture = 'p': kinds of media are image, video, audio"),
        ({"image": ""}, "image is empty; it names the column"),
    ],
)
def test_a_kind_of_media_that_nothing_looks_for_is_refused(keys: dict[str, str], said: str) -> None:
    assert re.search(rf"data\.multimodal_keys\.{said}", refused(data={"multimodal_keys": keys}))
    held_out = {"name": "a", "path": "/a", "multimodal_keys": keys}
    text = refused(eval={"datasets": [held_out]})
    assert re.search(rf"multimodal_keys of eval\.datasets 'a'\.{said}", text)


def test_a_filter_with_a_fallback_is_not_sent_to_what_its_mode_refuses() -> None:
    chosen = {"dynamic_sampling_filter_path": "nonzero_std_with_fallback"}
    assert "set rollout.over_sampling_batch_size" in refused(filter=chosen)
    text = refused(filter=chosen, run={"mode": "fully-async"})
    assert "'fully-async' has none; use 'nonzero_std'" in text
