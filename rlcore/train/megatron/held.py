"""What this rank holds of a model, tensor by tensor, with the rules that say what it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from rlcore.models.architecture import Architecture
from rlcore.train.megatron.optimizer import Weight
from rlcore.train.megatron.weights import held_rules, held_tensors, is_share
from rlcore.weights.megatron import Rule

HEAD_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")


@dataclass(frozen=True, eq=False)
class Held:
    """One tensor of Megatron's."""

    name: str
    """Unique on this rank."""
    buffer: Tensor
    parameter: nn.Parameter | None
    """None: it is not trained."""
    rule: Rule
    arch: Architecture
    repeated: bool
    """It is the copy of an embedding that the last stage of a pipeline has."""

    @property
    def tensor(self) -> Tensor:
        """Where it lies now: an optimizer moves what it trains into memory of its own."""
        return self.buffer if self.parameter is None else self.parameter.detach()

    @property
    def of_experts(self) -> bool:
        """Whether it belongs to an expert."""
        return self.rule.expert is not None

    @property
    def weight(self) -> Weight | None:
        """For an optimizer, if it is trained."""
        if self.parameter is None:
            return None
        share = is_share(self.rule, self.tensor)
        # Latent attention normalises what is whole on every rank.
        of_heads = self.name.endswith(HEAD_NORMS) and not self.arch.is_latent
        of_tokens = bool(getattr(self.parameter, "sequence_parallel", False))
        return Weight(
            name=self.name,
            parameter=self.parameter,
            of_experts=self.of_experts,
            is_share=share,
            acts_on_share=not share and (of_heads or of_tokens),
            repeated=self.repeated,
        )


def held_by(chunks: Sequence[GPTModel], arch: Architecture) -> Iterator[Held]:
    """All tensors of this rank's runs of layers."""
    for number, chunk in enumerate(chunks):
        tensors, parameters = held_tensors(chunk), dict(chunk.named_parameters())
        for rule, name in held_rules(chunk, arch):
            tied = arch.tie_word_embeddings and name == "output_layer.weight"
            parameter = parameters.get(name)
            yield Held(
                name=f"{number}.{name}",
                buffer=tensors[name] if parameter is None else torch.empty(0),
                parameter=parameter,
                rule=rule,
                arch=arch,
                repeated=tied and not chunk.pre_process,
            )
