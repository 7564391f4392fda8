"""What `algorithm.true_on_policy_mode` with SGLang engines asks of the other settings."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig


def check_kernels_agree(config: "RunConfig") -> None:
    """The trainer can compute what the engines do."""
    train, cluster = config.train, config.cluster
    for wrong, setting, right in (
        (train.backend != "fsdp", f"train.backend = {train.backend!r}", "'fsdp'"),
        (train.precision != "bfloat16", f"train.precision = {train.precision!r}", "'bfloat16'"),
        (
            train.context_parallel_size != 1,
            f"train.context_parallel_size = {train.context_parallel_size}",
            "1",
        ),
        (
            config.model.lora_rank is not None,
            f"model.lora_rank = {config.model.lora_rank}",
            "no adapters",
        ),
        (
            cluster.rollout_num_gpus_per_engine != 1,
            f"cluster.rollout_num_gpus_per_engine = {cluster.rollout_num_gpus_per_engine}",
            "1",
        ),
    ):
        if wrong:
            raise ValueError(
                "algorithm.true_on_policy_mode = true with rollout.engine = 'sglang' has the "
                f"trainer compute as the engines do, which it cannot with {setting}; set {right}, "
                "or bound the gap by algorithm.max_logprob_gap without the mode"
            )
