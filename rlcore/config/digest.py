"""Digests of a configuration: equal digests mean that the same thing would be computed.

Where a run is stored, how long things may take and how many processes help are no part of a digest,
and of a path only its last name is, so a run can move to another machine and go on. That a file
still holds the same is for `rlcore.sources` to find.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rlcore.config.fields import path_values
from rlcore.config.tree import RunConfig, Section

NOT_COMPUTED = frozenset({"storage", "cluster", "tracking"})
MEGATRON_LAYOUT = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "use_distributed_optimizer",
    }
)
"""Settings of `megatron` that say how a model lies on ranks, and not what is computed."""

NEWER: tuple[tuple[str, str, Any], ...] = (
    ("run", "mode", "sync"),
    ("rollout", "teacher_url", None),
    ("run", "train_from", ""),
    ("data", "response_key", None),
    ("rollout", "async_buffer_size", 1),
    ("rollout", "update_weights_interval", 1),
    ("rollout", "max_staleness", None),
    ("algorithm", "loss_type", "policy_loss"),
    ("compat", "slime", False),
    ("compat", "args", {}),
    ("rollout", "data_source_path", None),
    ("eval", "reward_key", None),
    ("eval", "eval_function_path", None),
    ("algorithm", "ref_update_interval", None),
    ("algorithm", "custom_reward_post_process_path", None),
    ("algorithm", "custom_convert_samples_to_train_data_path", None),
    ("algorithm", "custom_advantage_function_path", None),
    ("algorithm", "custom_tis_function_path", None),
    ("algorithm", "custom_pg_loss_reducer_function_path", None),
    ("algorithm", "custom_loss_function_path", None),
    ("rollout", "sample_hook_paths", []),
    ("model", "lora_rank", None),
    ("model", "lora_alpha", 32.0),
    ("model", "lora_target_modules", []),
    ("train", "optimizer_cpu_offload", False),
    ("train", "torch_compile", True),
    ("weights", "custom_update_weight_post_write_path", None),
    ("weights", "delta_base_interval", 20),
    ("train", "use_routing_replay", False),
    ("train", "custom_megatron_init_path", None),
    ("train", "custom_megatron_before_log_prob_hook_path", None),
    ("train", "custom_megatron_before_train_step_hook_path", None),
    ("rollout", "use_rollout_routing_replay", False),
    ("rollout", "hf_checkpoint", None),
    ("train", "context_parallel_size", 1),
    ("train", "deterministic", False),
    ("weights", "lora_as_adapter", False),
)
"""Settings at values that are left out, so that runs of older releases keep their digests."""
NEWER_SECTIONS = frozenset({"compat", "megatron"})
"""Sections that are left out where nothing of theirs is left."""

STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "rollout": ("run", "model", "data", "rollout", "sglang"),
    "reward": ("reward",),
    "filter": ("filter", "reward"),
    "train": ("run", "model", "algorithm", "train", "megatron"),
    "evaluate": ("run", "eval", "reward", "rollout"),
}
"""The sections that a stage's result depends on, beside its inputs, where others need to know.

A rollout that scores and filters its groups as it goes depends on the settings of those stages too;
`extra["scores"]` of its manifest holds their digests.
"""


def config_digest(config: RunConfig, *sections: str) -> str:
    """SHA-256 over the named sections, or over all that change what a run computes.

    `train.num_iterations` counts only where the learning-rate schedule depends on it, so a run with
    a constant rate can be made longer.
    """
    return tree_digest(config.model_dump(mode="json"), *sections)


def tree_digest(tree: Mapping[str, Any], *sections: str) -> str:
    """`config_digest` of a configuration as it is stored, whatever version of Sluice stored it."""
    names = sections or tuple(name for name in tree if name not in NOT_COMPUTED)
    constant = tree.get("train", {}).get("lr_schedule", "constant") == "constant"
    placeless = _placeless(tree)
    computed = {
        name: {
            k: v
            for k, v in placeless[name].items()
            if not (_is_operational(name, k, constant) or (name, k, v) in NEWER)
        }
        for name in names
    }
    computed = {k: v for k, v in computed.items() if v or k not in NEWER_SECTIONS}
    text = json.dumps(computed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_operational(config: RunConfig, section: str, key: str) -> bool:
    """Whether a setting may be changed in a run, since it does not change what is computed."""
    return _is_operational(section, key, config.train.lr_schedule == "constant")


def _is_operational(section: str, key: str, constant_rate: bool) -> bool:
    if section in NOT_COMPUTED or (constant_rate and (section, key) == ("train", "num_iterations")):
        return True
    if section == "megatron" and key in MEGATRON_LAYOUT:
        return True
    kind = RunConfig.model_fields[section].annotation if section in RunConfig.model_fields else None
    return isinstance(kind, type) and issubclass(kind, Section) and key in kind.OPERATIONAL


def _placeless(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which a path is its last name."""
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    for path in path_values(tree, RunConfig):
        *way, last = path.name.split(".")
        node: Any = copy
        for step in way:
            node = node[int(step) if isinstance(node, list) else step]
        node[int(last) if isinstance(node, list) else last] = path.value.rpartition("/")[2]
    return copy
