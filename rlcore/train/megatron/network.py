"""One rank's part of a model, and how micro-batches are passed through all parts: by the schedules
of megatron-core, whatever the layout.

A micro-batch is packed sequences; some tokens of padding come behind them where ranks divide tokens
evenly. The last stage of a pipeline alone comes to log-probs and losses; the others are told.

Invariants:
- Nothing is ever made of padding: no row stands there, and attention does not reach it.
- The logits of all tokens never exist at once, unless they are asked for; the vocabulary is never
  gathered for log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from rlcore.algorithms.flops import ModelShape
from rlcore.algorithms.metrics import Metrics
from rlcore.models.architecture import Architecture
from rlcore.train.backend import Loss
from rlcore.train.credit import MicroBatch
from rlcore.train.megatron import parallel
from rlcore.train.megatron.attention import PackedRotary, angles, sequence_layout
from rlcore.train.megatron.cpu import CPU, own_device, without_cuda
from rlcore.train.megatron.logprobs import parallel_log_probs
from rlcore.train.megatron.model import Layout
from rlcore.train.megatron.router import Routers, Tokens

Finish = Callable[[int, Tensor], tuple[Tensor, Any]]
"""From the number of a micro-batch and its hidden states to a loss and what is told of it."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What a model is given of a micro-batch on this rank."""

    input_ids: Tensor
    """int64 [1, T]: this rank's run of the tokens, with context parallelism."""
    positions: Tensor
    """int64 [T], of the same tokens."""
    lengths: tuple[int, ...]
    """Of the sequences, over all ranks."""
    first: int
    """Where the run begins."""

    @classmethod
    def of(cls, micro: MicroBatch, layout: Layout, least: int = 0) -> Feed:
        """With as much padding as the layout needs, `least` tokens in all."""
        packed = micro.packed
        parts = layout.context_parallel
        whole = parts * (layout.tensor_parallel if layout.sequence_parallel else 1)
        count = len(packed.input_ids)
        least = max(count, least)
        padding = least + -least % whole - count
        lengths = packed.lengths
        ids, positions = packed.input_ids, packed.position_ids
        if padding:
            lengths = (*lengths, padding)
            ids = torch.cat([ids, ids.new_zeros(padding)])
            more = torch.arange(padding, device=positions.device)
            positions = torch.cat([positions, more])
        each = (count + padding) // parts
        first = each * parallel_state.get_context_parallel_rank()
        own = slice(first, first + each)
        return cls(ids[None, own], positions[own], lengths, first)


class Network:
    """The runs of layers that this rank has of a model."""

    def __init__(
        self,
        chunks: list[GPTModel],
        arch: Architecture,
        layout: Layout,
        shape: ModelShape,
        padding_id: int | None = None,
    ) -> None:
        """`padding_id`: a token whose embedding gets no gradient from where it is read, as in
        transformers, which fill in with it.
        """
        self._padding_id = padding_id
        self.chunks = chunks
        self.arch = arch
        self.layout = layout
        self.shape = shape
        self.routers = Routers(chunks, arch)
        for chunk in chunks if arch.is_latent else ():
            for layer in chunk.decoder.layers:
                PackedRotary(layer.self_attention)
        self._schedule = get_forward_backward_func()

    @property
    def last(self) -> GPTModel | None:
        """The run that ends in the output layer, on the stage that has it."""
        return self.chunks[-1] if self.chunks[-1].post_process else None

    def run(self, micros: Sequence[MicroBatch], finish: Finish, *, train: bool) -> list[Any]:
        """Pass micro-batches through, forward and, to train, backward.

        Args:
            micros: as many on every rank.
            finish: called for each where the hidden states are.
            train: whether gradients of the losses are added up on the parameters.

        Returns:
            What `finish` told of each, on the last stage; nothing on the others.
        """
        if not micros:
            return []
        # Interleaved schedules pass tensors of one shape between stages.
        interleaved = self.layout.virtual_pipeline is not None
        least = max(len(m.packed.input_ids) for m in micros) if interleaved else 0
        feeds = [Feed.of(micro, self.layout, least) for micro in micros]
        # Interleaved schedules want as many as there are stages, or a multiple.
        stages = self.layout.pipeline_parallel if interleaved else 1
        extra = -len(feeds) % stages
        order = [*range(len(feeds)), *(-1 for _ in range(extra))]
        tokens = [self._tokens(m, f, train=train) for m, f in zip(micros, feeds, strict=True)]
        if extra:
            tokens.append(replace(tokens[-1], counted=False, chosen=None))
        self.routers.begin(tokens)
        step = partial(self._step, feeds=feeds, tokens=tokens, finish=finish)
        iterators: Any = [iter(order) for _ in self.chunks]
        with without_cuda(), torch.set_grad_enabled(train):
            told = self._schedule(
                forward_step_func=step,
                data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(order),
                # Else lengths are told from stage to stage.
                seq_length=sum(feeds[0].lengths),
                micro_batch_size=1,
                forward_only=not train,
                collect_non_loss_data=not train,
            )
        self.routers.take(None)
        for micro, one in zip(micros, tokens, strict=False):
            self.routers.record(micro, one)
        return cast(list[Any], told)[: len(feeds)]

    def _tokens(self, micro: MicroBatch, feed: Feed, *, train: bool) -> Tokens:
        """Those that routers get on this rank: between layers, a share of the feed."""
        first, count = feed.first, feed.input_ids.shape[1]
        if self.layout.sequence_parallel:
            count //= self.layout.tensor_parallel
            first += count * parallel_state.get_tensor_model_parallel_rank()
        return self.routers.tokens(micro, first, count, trained=train)

    def _step(
        self,
        numbers: Iterator[int],
        chunk: GPTModel,
        *,
        feeds: list[Feed],
        tokens: list[Tokens],
        finish: Finish,
    ) -> tuple[Tensor, Any]:
        """megatron-core's `forward_step_func`."""
        number = next(numbers)
        self.routers.take(tokens[number])
        hidden = self._decode(chunk, feeds[number])

        def of_output(hidden: Tensor, non_loss_data: bool = False) -> Any:
            loss, told = finish(number, hidden)
            if non_loss_data:
                return told
            loss = loss if number >= 0 else loss * 0.0
            # As many tokens as one: the loss is left as it is.
            return loss, torch.ones((), dtype=torch.int32, device=loss.device), told

        return hidden, of_output

    def _decode(self, chunk: GPTModel, feed: Feed) -> Tensor:
        """Hidden states [T', 1, H] behind this run of layers."""
        hidden = None
        if chunk.pre_process:
            hidden = chunk.embedding(input_ids=feed.input_ids, position_ids=feed.positions[None])
            if self._padding_id is not None:
                hidden = _with_still(hidden, feed.input_ids[0], self._padding_id)
            # As those between layers lie: torch would compile the first layer apart.
            hidden = hidden.squeeze(1).unsqueeze(1)
        lengths, told = feed.lengths, dict[str, Any]()
        if self.arch.is_latent:
            told["attention_mask"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        else:
            told["attention_mask"] = None
            told["attention_bias"] = sequence_layout(lengths, feed.positions.device)
            told["rotary_pos_emb"] = angles(chunk.rotary_pos_emb, feed.positions, max(lengths))
        return cast(Tensor, chunk.decoder(hidden_states=hidden, **told))

    # --- what hidden states come to ---------------------------------------------------------------

    def at_rows(
        self, micro: MicroBatch, hidden: Tensor, *, alike: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Hidden states at those rows of a micro-batch that this rank has, and which of the rows
        they are.

        Args:
            alike: tensor-parallel ranks all go on with the same; else gradients are of a sum over
                what each makes of them.
        """
        tensor = parallel_state.get_tensor_model_parallel_group()
        if self.layout.sequence_parallel and tensor.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, not alike, group=tensor)
        hidden = hidden[:, 0]
        first = len(hidden) * parallel_state.get_context_parallel_rank()
        at = torch.arange(len(micro.rows), device=micro.rows.device)
        if self.layout.context_parallel > 1:
            at = ((micro.rows >= first) & (micro.rows < first + len(hidden))).nonzero()[:, 0]
        chosen = hidden.index_select(0, micro.rows[at] - first)
        if not self.layout.sequence_parallel and tensor.size() > 1 and not alike:
            chosen = copy_to_tensor_model_parallel_region(chosen, group=tensor)
        return chosen, at

    def of_all_rows(self, values: Tensor, at: Tensor, micro: MicroBatch) -> Tensor:
        """[M] from the values [m] of this rank's rows, over context-parallel ranks."""
        if self.layout.context_parallel == 1:
            return values
        spread = values.new_zeros(len(micro.rows)).index_copy(0, at, values)
        group = parallel_state.get_context_parallel_group()
        return cast(Tensor, reduce_from_tensor_model_parallel_region(spread, group=group))

    def all_metrics(self, found: list[list[Metrics]]) -> list[Metrics]:
        """Of all micro-batches, as the last stage found them, on all stages."""
        stages = parallel.stages()
        if stages.size > 1:
            # Pickled on a GPU, a tensor would come back on that GPU.
            on_host = [[_moved(one, CPU) for one in told] for told in found]
            spread = parallel.spread_object(on_host, stages, stages.size - 1)
            found = [[_moved(one, own_device()) for one in told] for told in spread]
        return [metrics for one in found for metrics in one]

    def all_values(self, found: list[Tensor], micros: Sequence[MicroBatch]) -> list[Tensor]:
        """[M] of each micro-batch, as the last stage found them, on all stages."""
        stages = parallel.stages()
        if stages.size == 1 or not micros:
            return found
        lengths = [len(micro.rows) for micro in micros]
        device = micros[0].rows.device
        joined = torch.cat(found) if found else torch.zeros(sum(lengths), device=device)
        parallel.spread(joined, stages, stages.size - 1)
        return list(joined.split(lengths))


class PolicyNetwork(Network):
    """A policy: what answers log-probs."""

    frozen = False
    """All weights are trained."""

    @property
    def expert_load(self) -> Routers:
        """See `TrainedPolicy`."""
        return self.routers

    def score(self, micros: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """See `Scores`."""

        def finish(number: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
            log_probs, _ = self._log_probs(micros[number], hidden, temperature)
            return log_probs.sum(), log_probs

        return self.all_values(self.run(micros, finish, train=False), micros)

    def accumulate(
        self, micros: Sequence[MicroBatch], loss: Loss, *, scale: float, temperature: float | None
    ) -> list[Metrics]:
        """See `TrainedPolicy`."""

        def finish(number: int, hidden: Tensor) -> tuple[Tensor, list[Metrics]]:
            micro = micros[number]
            answer: Any = (
                self._logits(micro, hidden)
                if temperature is None
                else self._log_probs(micro, hidden, temperature)
            )
            value, told = loss(micro, answer)
            return value * scale, told

        return self.all_metrics(self.run(micros, finish, train=True))

    def _output_weight(self) -> tuple[Tensor, int]:
        """This rank's rows of the output layer without padding, and the id of the first."""
        last = self.last
        assert last is not None
        weight = last.shared_embedding_or_output_weight()
        if not self.arch.tie_word_embeddings:
            weight = last.output_layer.weight
        start = weight.shape[0] * parallel_state.get_tensor_model_parallel_rank()
        rows = max(0, self.arch.vocab_size - start)
        # The gradient of a slice would be copied into one of the whole.
        return weight if rows >= weight.shape[0] else weight[:rows], start

    def _log_probs(
        self, micro: MicroBatch, hidden: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [M] and entropies [M]."""
        chosen, at = self.at_rows(micro, hidden)
        weight, start = self._output_weight()
        targets = micro.pick("targets")[at]
        group = parallel_state.get_tensor_model_parallel_group()
        found = parallel_log_probs(chosen, weight, targets, temperature, start, group)
        log_probs, entropy = (self.of_all_rows(values, at, micro) for values in found)
        return log_probs, entropy

    def _logits(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """Logits [T, V] of all tokens: ranks gather tokens and vocabulary."""
        tensor = parallel_state.get_tensor_model_parallel_group()
        if self.layout.sequence_parallel and tensor.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=tensor)
        elif tensor.size() > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tensor)
        weight, _ = self._output_weight()
        logits = (hidden[:, 0] @ weight.t()).float()
        if tensor.size() > 1:
            each = self.layout.padded(self.arch.vocab_size) // tensor.size()
            logits = nn.functional.pad(logits, (0, each - logits.shape[1]))
            logits = gather_from_tensor_model_parallel_region(logits, group=tensor)
        if self.layout.context_parallel > 1:
            logits = gather_from_sequence_parallel_region(
                logits, False, group=parallel_state.get_context_parallel_group()
            )
        return logits[: len(micro.packed.input_ids), : self.arch.vocab_size]


def _moved(metrics: Metrics, device: torch.device) -> Metrics:
    """On another device."""
    means, maxima = (
        {name: value.to(device) for name, value in values.items()}
        for values in (metrics.means, metrics.maxima)
    )
    return Metrics(means, maxima)


def _with_still(hidden: Tensor, ids: Tensor, token: int) -> Tensor:
    """Embeddings [T', 1, H] of this rank's share of tokens [T], without the gradient of one."""
    share = ids.view(-1, len(hidden))
    rank = parallel_state.get_tensor_model_parallel_rank() if len(share) > 1 else 0
    still = (share[rank] == token)[:, None, None]
    return torch.where(still, hidden.detach(), hidden)
