"""Importance weights as a plugin of slime's makes them: per sequence, gathered and sliced again."""

import torch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp


def sequence_weights(
    args,
    *,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
    **kwargs,
):
    weights = []
    for k, (total, length) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        ours = all_gather_with_cp(train_log_probs[k], total, length)
        theirs = all_gather_with_cp(rollout_log_probs[k], total, length)
        mask = loss_masks[k]
        mean = ((ours - theirs) * mask).sum() / mask.sum().clamp(min=1)
        weight = mean.exp().clamp(max=args.tis_clip).expand(length)
        weights.append(slice_log_prob_with_cp(weight, total, length, "thd", None))
    flat = torch.cat(weights).detach()
    return pg_loss * flat, loss_masks, {"weight": flat}
