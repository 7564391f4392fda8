"""Which modes have which stages, and what those that roll out ahead of the trainer need."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig

WITHOUT_TRAINER = frozenset({"debug-rollout-only"})
"""Modes in which nothing is trained."""
WITHOUT_ENGINES = frozenset({"debug-train-only", "sft"})
"""Modes in which nothing is generated."""
AHEAD = frozenset({"async", "fully-async"})
"""Modes in which samples may be of older policies than the one that is trained."""
AGAINST_STALENESS = frozenset({"use_tis", "use_rollout_logprobs"})
"""Settings of [algorithm] that correct for samples of an older policy."""
NOT_WITHOUT_END = (
    "over_sampling_batch_size",
    "partial_rollout",
    "custom_rollout_function_path",
    "data_source_path",
    "buffer_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
)
"""Settings of [rollout] that have no meaning where generation does not end."""


def check_ahead(config: "RunConfig") -> None:
    """What the modes that roll out ahead need, and that their settings are for them alone."""
    rollout, interval = config.rollout, config.eval.eval_interval
    most, every = rollout.max_staleness, rollout.update_weights_interval
    if not config.is_async:
        for key in ("async_buffer_size", "update_weights_interval"):
            if getattr(rollout, key) != 1:
                raise ValueError(
                    f"rollout.{key} = {getattr(rollout, key)} is for run.mode = 'async' and "
                    "'fully-async' alone"
                )
        grows = rollout.partial_rollout and config.trains and config.generates
        if most is not None and not grows:
            raise ValueError(
                f"rollout.max_staleness = {most}, but no token is ever of an older policy: it "
                "is for run.mode = 'async' or 'fully-async', and rollout.partial_rollout = true"
            )
        return
    if config.cluster.colocate:
        raise ValueError(
            f"cluster.colocate = true with run.mode = {config.run.mode!r}: engines generate while "
            "the trainer trains, so they cannot share GPUs; give each its own, or use 'sync'"
        )
    if config.is_fully_async:
        _check_without_end(config)
    elif most is not None and most < config.lag:
        raise ValueError(
            f"rollout.max_staleness = {most}, but with rollout.async_buffer_size = "
            f"{rollout.async_buffer_size} and rollout.update_weights_interval = {every} "
            f"samples are up to {config.lag} iterations old; lower these, or raise it"
        )
    if interval is not None and interval % every:
        raise ValueError(
            f"eval.eval_interval = {interval} is no multiple of "
            f"rollout.update_weights_interval = {every}: between weight syncs the engines do "
            "not hold the model that was trained last"
        )


def _check_without_end(config: "RunConfig") -> None:
    most, every = config.rollout.max_staleness, config.rollout.update_weights_interval
    if most is not None and most < every:
        raise ValueError(
            f"rollout.max_staleness = {most}, but run.mode = 'fully-async' with "
            f"rollout.update_weights_interval = {every} trains on samples that are up to "
            f"{every} iterations old; raise it, or use 'sync'"
        )
    for key in NOT_WITHOUT_END:
        if getattr(config.rollout, key):
            raise ValueError(
                f"rollout.{key} is about rollouts that begin and end, and run.mode = "
                "'fully-async' has none; remove it, or use 'async'"
            )
