"""What the replaying of experts asks of the other settings."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig


def check_replay(config: "RunConfig") -> None:
    """There are experts to be replayed, and they reach the tokens that they are of."""
    of_engine, algorithm = config.rollout.use_rollout_routing_replay, config.algorithm
    if config.train.use_routing_replay and algorithm.use_rollout_logprobs and not of_engine:
        raise ValueError(
            "train.use_routing_replay = true has no effect with "
            "algorithm.use_rollout_logprobs = true, where the trainer computes no old "
            "log-probs; set rollout.use_rollout_routing_replay = true, or remove one of them"
        )
    if of_engine and config.run.mode == "sft":
        raise ValueError(
            "rollout.use_rollout_routing_replay = true replays the experts that engines chose, and "
            "run.mode = 'sft' has none; remove it"
        )
    if config.train.use_routing_replay and algorithm.loss_type == "sft_loss":
        raise ValueError(
            "train.use_routing_replay = true has no effect with algorithm.loss_type = 'sft_loss', "
            "for which no old log-probs are computed; remove it"
        )
    if (config.train.use_routing_replay or of_engine) and config.train.context_parallel_size > 1:
        raise ValueError(
            f"train.context_parallel_size = {config.train.context_parallel_size} shares the "
            "tokens of a sequence out, which replaying of experts does not follow; set 1, or "
            "remove train.use_routing_replay and rollout.use_rollout_routing_replay"
        )
    own = algorithm.custom_convert_samples_to_train_data_path
    if of_engine and own is not None:
        raise ValueError(
            "algorithm.custom_convert_samples_to_train_data_path makes sequences without the "
            "experts that rollout.use_rollout_routing_replay = true replays; remove one of them"
        )
