"""What `run.mode = "sft"` asks of the other settings, and what is for it alone."""

from typing import TYPE_CHECKING

from rlcore.config.reward import NO_REWARD

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig

FOR_GENERATING = (
    ("rollout", "custom_rollout_function_path"),
    ("rollout", "custom_generate_function_path"),
    ("rollout", "sample_hook_paths"),
    ("rollout", "over_sampling_batch_size"),
    ("rollout", "data_source_path"),
    ("rollout", "buffer_filter_path"),
    ("rollout", "rollout_sample_filter_path"),
    ("rollout", "rollout_all_samples_process_path"),
    ("weights", "custom_update_weight_post_write_path"),
    ("filter", "dynamic_sampling_filter_path"),
    ("data", "max_prompt_len"),
)
"""Settings that could have no effect where a data set is learned as it is."""


def check_demonstrations(config: "RunConfig") -> None:
    """Learning a data set goes without settings of generation, and other modes without its own."""
    if config.run.mode == "debug-train-only":
        return
    if config.run.mode != "sft":
        if config.reward.rm_type == NO_REWARD:
            raise ValueError(
                f"reward.rm_type = {NO_REWARD!r} is for run.mode = 'sft' alone; give exactly "
                "one of reward.rm_type and reward.custom_rm_path"
            )
        if config.data.response_key is not None:
            raise ValueError(
                f"data.response_key = {config.data.response_key!r} is for run.mode = 'sft'; the "
                "right answer of a prompt is data.label_key"
            )
        return
    needed = (
        ("algorithm.loss_type", config.algorithm.loss_type, "sft_loss"),
        ("rollout.n_samples_per_prompt", config.rollout.n_samples_per_prompt, 1),
        ("rollout.temperature", config.rollout.temperature, 1.0),
    )
    for name, value, only in needed:
        if value != only:
            raise ValueError(
                f"{name} = {value!r}, but run.mode = 'sft' learns each row once, as it is, by "
                f"cross-entropy: set {name} = {only!r}"
            )
    for section, key in FOR_GENERATING:
        if getattr(getattr(config, section), key) not in (None, []):
            raise ValueError(
                f"{section}.{key} is set, but run.mode = 'sft' generates nothing; remove it"
                + (" (rollout.context_length cuts)" if key == "max_prompt_len" else "")
            )
