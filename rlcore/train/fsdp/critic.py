"""The critic of PPO: the starting model's decoder with a head that says what a token will come to.

It has the policy's architecture and starts with its weights; only the head, one output and a bias,
begins at random. It is sharded and stepped as the policy is.

Invariant: all ranks begin with the same head (`rlcore.train.value_head`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from rlcore.algorithms.packing import PackedBatch, PackedImages
from rlcore.train.fsdp.attention import SequenceLayout
from rlcore.train.fsdp.context import Context, ContextLayout
from rlcore.train.fsdp.model import hidden_states, load_policy
from rlcore.train.fsdp.optimizer import ShardedAdamW
from rlcore.train.value_head import value_head


class Critic(nn.Module):
    """A decoder from token ids to values."""

    def __init__(self, lm: Any, seed: int, context: Context | None = None) -> None:
        """`context`: the ranks that share each micro-batch, where they do."""
        super().__init__()
        self.context = context
        self.body = lm.base_model
        self.head = value_head(lm.get_output_embeddings().weight.shape[1], seed)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SequenceLayout | ContextLayout,
        rows: Tensor,
        images: PackedImages | None = None,
    ) -> Tensor:
        """[M] float32: values at some positions of a packed micro-batch; as `Policy.forward`."""
        decoded = hidden_states(self.body, input_ids, position_ids, layout, images)
        hidden = decoded.index_select(0, rows)
        # Summed and not indexed: FSDP warns of outputs that are views.
        return cast(Tensor, self.head(hidden).sum(-1).float())

    def values(self, batch: PackedBatch, rows: Tensor) -> Tensor:
        """`forward` of a packed micro-batch that is on the model's device; `rows` likewise."""
        if self.context is not None:
            share = self.context.share(batch, rows)
            return share.gather(self(share.input_ids, share.position_ids, share.layout, share.rows))
        layout = SequenceLayout.of(batch.lengths, batch.input_ids.device)
        return cast(Tensor, self(batch.input_ids, batch.position_ids, layout, rows, batch.images))

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by name; one that is tied comes once."""
        yield from self.named_parameters()


class TrainedCritic(NamedTuple):
    """A critic with its optimizer."""

    model: Critic
    optimizer: ShardedAdamW


def load_critic(
    folder: Path,
    seed: int,
    *,
    trust_remote_code: bool = False,
    checkpointing: bool = False,
    context: Context | None = None,
) -> Critic:
    """Read a Hugging Face folder into a critic on the CPU.

    Raises:
        ConfigError: as `load_policy`.
    """
    policy = load_policy(
        folder,
        trust_remote_code=trust_remote_code,
        checkpointing=checkpointing,
        context=context,
    )
    return Critic(policy.lm, seed, context).train(policy.training)
