"""The critic of PPO: the starting model's layers, laid out on ranks as the policy's are, and in
place of the output layer a head that says what a token will come to.

Invariants:
- All tensor-parallel ranks of the last stage have the whole head, and come to the same values and
  the same gradient of it.
- In a state the names are those of FSDP2's critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from rlcore.algorithms.flops import ModelShape
from rlcore.algorithms.metrics import Metrics
from rlcore.conversion.sources import Tensors
from rlcore.models.architecture import Architecture
from rlcore.models.tensors import TensorSpec
from rlcore.train.backend import Loss
from rlcore.train.credit import MicroBatch
from rlcore.train.megatron.held import Held, held_by
from rlcore.train.megatron.model import Layout
from rlcore.train.megatron.network import Network
from rlcore.train.megatron.optimizer import DistributedAdamW
from rlcore.train.megatron.state import Part
from rlcore.train.megatron.weights import ReadTensor
from rlcore.weights.megatron import Rule

HEAD, BODY, MODEL = "head.", "body.", "model."
"""What names begin with: of the head, of all else in a state, and of that in published folders."""


class CriticNetwork(Network):
    """Implements `CriticModel`."""

    def __init__(
        self,
        chunks: list[GPTModel],
        arch: Architecture,
        layout: Layout,
        shape: ModelShape,
        padding_id: int | None,
        head: nn.Linear,
    ) -> None:
        """
        Args:
            chunks: this rank's runs of layers, built with an output layer of their own.
            arch, layout, shape, padding_id: the model's.
            head: takes the place of the output layer, on the stage that has it.
        """
        # With tied embeddings, no tensor is the output layer's.
        super().__init__(
            chunks, arch.model_copy(update={"tie_word_embeddings": True}), layout, shape, padding_id
        )
        self.head = None
        if (last := self.last) is not None:
            norm = last.decoder.final_layernorm.weight
            last.output_layer = self.head = head.to(norm.device, norm.dtype)

    def held(self) -> Iterator[Held]:
        """All tensors of this rank."""
        # The last stage has no copy of the embedding.
        yield from (held for held in held_by(self.chunks, self.arch) if not held.repeated)
        for name, weight in self.head.named_parameters() if self.head is not None else ():
            rule = Rule(f"value_head.{name}", (TensorSpec(HEAD + name, tuple(weight.shape)),))
            yield Held(
                name=f"{len(self.chunks) - 1}.{rule.megatron}",
                buffer=torch.empty(0),
                parameter=weight,
                rule=rule,
                arch=self.arch,
                repeated=False,
            )

    def values(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """See `CriticModel`."""

        def finish(number: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
            values = self._values(micros[number], hidden)
            return values.sum(), values

        return self.all_values(self.run(micros, finish, train=False), micros)

    def accumulate(self, micros: Sequence[MicroBatch], loss: Loss) -> list[Metrics]:
        """See `CriticModel`."""

        def finish(number: int, hidden: Tensor) -> tuple[Tensor, list[Metrics]]:
            return loss(micros[number], self._values(micros[number], hidden))

        return self.all_metrics(self.run(micros, finish, train=True))

    def _values(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """[M] float32: values at the trained positions."""
        assert self.head is not None
        chosen, at = self.at_rows(micro, hidden, alike=True)
        return self.of_all_rows(self.head(chosen)[:, 0].float(), at, micro)


class TrainedCritic(NamedTuple):
    """A critic with its optimizer, and all tensors that this rank has of it."""

    model: CriticNetwork
    optimizer: DistributedAdamW
    held: list[Held]


def with_head(read: ReadTensor, head: nn.Linear) -> ReadTensor:
    """Tensors of a model, and of a head."""
    own = {HEAD + name: tensor for name, tensor in head.state_dict().items()}
    return lambda name: own[name] if name in own else read(name)


@dataclass(frozen=True)
class CriticPart(Part):
    """A critic in a state."""

    prefix: str = "critic."

    def name(self, hf: str) -> str:
        """See `Part`."""
        return hf if hf.startswith(HEAD) else BODY + hf.removeprefix(MODEL)

    def reader(self, stored: Tensors, model: Tensors) -> ReadTensor:
        """See `Part`."""
        read = super().reader(_Body(stored), model)
        return lambda name: stored.read(name) if name.startswith(HEAD) else read(name)


class _Body:
    """Implements `Tensors`: a stored critic but for its head, by the names of its model."""

    def __init__(self, stored: Tensors) -> None:
        self.where = stored.where
        self._stored = stored
        self._names = {
            MODEL + name.removeprefix(BODY): name
            for name in stored.shapes
            if not name.startswith(HEAD)
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: stored.shapes[own] for name, own in self._names.items()
        }

    def dtype(self, name: str) -> str:
        """As safetensors writes it."""
        return self._stored.dtype(self._names[name])

    def read(self, name: str, at: tuple[int | slice, ...] = ()) -> Tensor:
        """One tensor, or a part of it."""
        return self._stored.read(self._names[name], at)
