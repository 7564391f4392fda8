"""A loss of one's own that is the policy loss of an on-policy step."""

from typing import Any

import torch


def loss(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> tuple[Any, dict[str, Any]]:
    """-A log-prob / its own value: the gradient of the clipped surrogate where the ratio is 1."""
    log_probs = logits[0].log_softmax(-1)
    start, parts, advantages = 0, [], []
    for tokens, response, advantage in zip(
        batch["unconcat_tokens"], batch["response_lengths"], batch["advantages"], strict=True
    ):
        end = start + len(tokens)
        rows = log_probs[end - response - 1 : end - 1]
        parts.append(rows.gather(1, tokens[-response:, None])[:, 0])
        advantages.append(advantage)
        start = end
    of_tokens = torch.cat(parts)
    ratio = (of_tokens - of_tokens.detach()).exp()
    value = sum_of_sample_mean(-ratio * torch.cat(advantages))
    return value, {"seen": sum_of_sample_mean(torch.ones_like(of_tokens)).detach()}
