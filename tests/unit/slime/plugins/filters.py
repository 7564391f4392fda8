"""Filters and hooks around a rollout, as slime's users write them."""

import torch
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

__all__ = ["check_spread", "newest_first", "seen"]

seen: list[int] = []


def check_spread(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args.reward_key) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float64).std() > 1e-6
    return DynamicFilterOutput(keep=keep.item(), reason=None if keep else "zero_std")


def newest_first(args, rollout_id, buffer: list[list[Sample]], num_samples: int):
    taken = buffer[-num_samples:]
    del buffer[-num_samples:]
    return taken


def drop_cut_off(args, data: list[list[Sample]]) -> None:
    for group in data:
        for sample in group:
            if sample.status == Sample.Status.TRUNCATED and args.drop_cut_off:
                sample.remove_sample = True


def look(args, all_samples, data_source) -> None:
    seen.append(len(all_samples))
