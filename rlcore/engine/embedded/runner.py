"""The model: reads prompts, takes decode steps, scores tokens, holds and swaps the weights.

Invariant: a result for one sequence is computed in a shape that depends on that sequence alone.
Prompts are padded to a multiple of 16 at the end, behind the causal mask; the rows of a batch are
padded to one of `batch_sizes`, among which `calibrate` found no difference in any bit on this
machine (if it finds one, the engine computes row by row).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.engine.embedded import attention
from rlcore.engine.embedded.kv import KVShape, Lane, Prompt
from rlcore.engine.embedded.weights import load_blobs, load_folder, load_tensors, tied_names
from rlcore.errors import EngineError
from rlcore.images.layout import SequenceImages
from rlcore.images.model import Picture, attend, attention_of, auto_class, decoder, embed, sees
from rlcore.routing import Routing
from rlcore.weights.experts import by_expert
from rlcore.weights.names import checkpoint_names

PROMPT_MULTIPLE = 16
"""Prompts are padded to a multiple of this: matrix kernels treat full tiles alike."""
PREFILL_TOKENS = 256
"""Prompts are read together up to this many tokens (padding included)."""
BATCH_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows that a decode step is padded to: multiples of 16, like prompts."""
LOGIT_ROWS = 256
"""Positions whose vocabulary-wide log-probabilities are held at once."""


class ModelRunner:
    """One causal language model, which may see images, with its weights on one device. Used by one
    thread at a time.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        device: str,
        context_length: int | None = None,
        *,
        routed_experts: bool = False,
    ) -> None:
        """`routed_experts`: record which experts each token is sent to."""
        attention.register()
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        model: Any = auto_class(path).from_pretrained(
            str(path),
            dtype=self.dtype,
            attn_implementation=attention_of(path, attention.NAME),
            local_files_only=True,
            use_safetensors=True,
        )
        self.model = model
        self.model.to(self.device).eval().requires_grad_(False)
        self.config = model.config
        text = model.config.get_text_config()
        self.text_config = text
        self.sees = sees(model.base_model)
        self._routing = Routing(getattr(decoder(model.base_model), "layers", ()))
        self._routing.watches = routed_experts
        if routed_experts and not self._routing.has_experts:
            raise EngineError("--enable-return-routed-experts, but the model has no experts.")
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.context_length = self._context_length(context_length)
        self.kv_shape = KVShape(
            layers=text.num_hidden_layers,
            heads=getattr(text, "num_key_value_heads", text.num_attention_heads),
            head_dim=getattr(text, "head_dim", None)
            or text.hidden_size // text.num_attention_heads,
            dtype=self.dtype,
            device=self.device,
        )
        _own_storage(self.model)
        held: dict[str, Tensor] = dict(self.model.state_dict())
        names = checkpoint_names(held, path)
        self.state = {
            name: part
            for own, tensor in held.items()
            for name, part in by_expert(names[own], tensor)
        }
        """Under the names of the model's folder."""
        self._tied = tied_names(self.state)
        self.empty: set[str] = set()
        """Names in `state` of weights that were released and have got no values since."""
        self.parameters = sum(p.numel() for p in model.parameters())
        sizing = _sizing(self.parameters)
        self.batch_sizes = tuple(size for size in BATCH_SIZES if size <= sizing.largest_batch)
        self.batched_prefill = True
        self.shortest_lane = _shortest_lane(
            self.parameters, sizing.lane_share, text, self.kv_shape.head_dim
        )

    @property
    def largest_batch(self) -> int:
        """Rows that one decode step takes."""
        return self.batch_sizes[-1]

    def prompts_together(self, length: int) -> int:
        """How many prompts of padded length `length` one `prefill` takes."""
        return max(1, PREFILL_TOKENS // length) if self.batched_prefill else 1

    def lane_length(self, tokens: int) -> int:
        """The length of the lane for a sequence of `tokens`: a power of two."""
        return max(self.shortest_lane, 1 << (tokens - 1).bit_length())

    def _context_length(self, wanted: int | None) -> int:
        longest = int(self.text_config.max_position_embeddings)
        if wanted is not None and wanted > longest:
            raise EngineError(
                f"--context-length {wanted} exceeds the model's max_position_embeddings {longest}."
            )
        return wanted or longest

    def attend(self, name: str) -> None:
        """Compute attention by another implementation of transformers."""
        attend(self.model, name)

    # -- computing ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, prompts: list[list[int]], images: Sequence[SequenceImages | None] = ()
    ) -> list[Prompt]:
        """Read prompts whose padded lengths are equal; see `padded`. `images` are those of each."""
        rows, length = len(prompts), padded(len(prompts[0]))
        ids = torch.zeros((rows, length), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        kv = self.kv_shape.zeros(rows, length)
        ids = ids.to(self.device)
        if any(images):
            hidden = self._seen(ids, images, attention.Prefill(kv))
        else:
            positions = torch.arange(length, device=self.device)[None].expand(rows, -1)
            hidden = self._hidden(ids, positions, attention.Prefill(kv))
        experts = self.experts()
        chosen = [None] * rows if experts is None else experts.split(length)
        last = torch.stack([hidden[i, len(p) - 1] for i, p in enumerate(prompts)])
        logits = torch.cat(
            [
                self._logits(F.pad(part, (0, 0, 0, self._pad_rows(len(part)) - len(part))))[
                    : len(part)
                ]
                for part in last.split(self.largest_batch)
            ]
        )
        # Copies, so that a kept prompt does not hold the whole batch in memory.
        return [
            Prompt(
                kv[:, :, i : i + 1, :, : len(p)].clone(),
                hidden[i, : len(p)].clone(),
                logits[i].clone(),
                None if (own := chosen[i]) is None else own[: len(p)].cpu(),
            )
            for i, p in enumerate(prompts)
        ]

    @torch.inference_mode()
    def decode(
        self,
        lane: Lane,
        begin: int,
        tokens: Tensor,
        positions: Tensor,
        shift: Tensor | None = None,
    ) -> Tensor:
        """Logits [n, vocabulary] after feeding `tokens` [n] at `positions` [n] to the lane's rows
        from `begin` on. n is at most the largest batch size. `shift` [n] is what images before
        them add to the positions that the model is told.
        """
        count = len(tokens)
        rows = self._pad_rows(count)
        ids = torch.zeros(rows, dtype=torch.long, device=self.device)
        at = torch.zeros(rows, dtype=torch.long, device=self.device)
        ids[:count] = tokens
        at[:count] = positions if shift is None else positions + shift
        step = attention.Decode(lane.kv[:, :, begin : begin + count], positions)
        hidden = self._hidden(ids[:, None], at[:, None], step)
        return self._logits(hidden[:, 0])[:count]

    @torch.inference_mode()
    def score(self, prompt: Prompt, tokens: list[int], start: int, top: int) -> tuple[
        list[float], list[list[tuple[float, int]]]
    ]:  # fmt: skip
        """Log-probabilities of tokens[start + 1:] given what is before them, and the `top`
        likeliest alternatives of each. Logits are not scaled by a temperature.
        """
        values: list[float] = []
        tops: list[list[tuple[float, int]]] = []
        for begin in range(start, len(tokens) - 1, LOGIT_ROWS):
            end = min(begin + LOGIT_ROWS, len(tokens) - 1)
            logprobs = torch.log_softmax(self._logits(prompt.hidden[begin:end]), dim=-1)
            targets = torch.tensor(tokens[begin + 1 : end + 1], device=self.device)
            values += logprobs.gather(1, targets[:, None])[:, 0].tolist()
            tops += likeliest(logprobs, top)
        return values, tops

    def experts(self) -> Tensor | None:
        """int32 [rows, layers, k] that the tokens of the last pass were sent to, padding included;
        None where that is not recorded.
        """
        return self._routing.seen() if self._routing.watches else None

    def _hidden(self, ids: Tensor, positions: Tensor, step: attention.Step) -> Tensor:
        output = decoder(self.model.base_model)(
            input_ids=ids, position_ids=positions, use_cache=False, kv=step
        )
        return output.last_hidden_state

    def _seen(
        self, ids: Tensor, images: Sequence[SequenceImages | None], step: attention.Prefill
    ) -> Tensor:
        """`_hidden` of prompts with images."""
        rows, length = ids.shape
        positions = torch.arange(length).expand(3, rows, -1).clone()
        places, pictures = [], []
        for i, one in enumerate(images):
            if one is None:
                continue
            told = torch.from_numpy(one.positions[:, :length])
            positions[:, i, : told.shape[1]] = told
            places.append(torch.from_numpy(one.at) + i * length)
            # By itself: its features are not to depend on what else is read.
            pixels, grids = one.pixels.values, one.pixels.grids
            pictures.append(
                Picture(
                    torch.from_numpy(pixels).to(self.device),
                    torch.from_numpy(grids).to(self.device),
                )
            )
        base = self.model.base_model
        mixed, more = embed(base, ids, torch.cat(places).to(self.device), pictures)
        output = decoder(base)(
            inputs_embeds=mixed,
            position_ids=positions.to(self.device),
            use_cache=False,
            kv=step,
            **more,
        )
        return output.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [n, vocabulary] of [n, hidden]."""
        return self.model.get_output_embeddings()(hidden).float()

    def _pad_rows(self, count: int) -> int:
        return next(size for size in self.batch_sizes if size >= count)

    # -- weights -----------------------------------------------------------------------------------

    def update_from_folder(self, folder: Path) -> int:
        """Replace all weights by those of a Hugging Face folder; returns the number of tensors."""
        return self._filled(load_folder(self.state, folder))

    def update_from_blobs(self, blobs: list[str]) -> int:
        """Replace the weights that safetensors blobs (base64) hold; returns the number of
        tensors.
        """
        return self._filled(load_blobs(self.state, blobs))

    def update_from_tensors(self, tensors: dict[str, Tensor]) -> int:
        """Replace the weights of these names; returns the number of tensors."""
        return self._filled(load_tensors(self.state, tensors))

    def _filled(self, names: list[str]) -> int:
        self.empty.difference_update(*(self._tied[name] for name in names))
        return len(names)

    def release(self) -> None:
        """Free the weights' memory; their values are lost."""
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in self._weights()}
        self.empty = {
            name
            for name, part in self.state.items()
            if part.untyped_storage().data_ptr() in storages
        }
        for storage in storages.values():
            storage.resize_(0)

    def resume(self) -> None:
        """Take the memory of released weights again; `empty` have no values until an update."""
        for parameter in self._weights():
            size = parameter.numel() * parameter.element_size()
            parameter.untyped_storage().resize_(size)

    def _weights(self) -> Iterator[Tensor]:
        return self.model.parameters()


def padded(length: int) -> int:
    """The length at which a prompt of `length` tokens is computed."""
    return -(-length // PROMPT_MULTIPLE) * PROMPT_MULTIPLE


def likeliest(logprobs: Tensor, top: int) -> list[list[tuple[float, int]]]:
    """The `top` largest of each row [n, vocabulary] as (log-probability, token id)."""
    if top == 0:
        return [[] for _ in range(len(logprobs))]
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return [
        list(zip(v, i, strict=True)) for v, i in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def _own_storage(model: torch.nn.Module) -> None:
    """Give every weight memory of its own: a loader may leave it mapped to the file on disk, which
    a trainer is free to replace, and mapped memory cannot be released.
    """
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


@dataclass(frozen=True, slots=True)
class Sizing:
    """How a model's decode steps are cut; measured on one core of a server processor."""

    largest_batch: int
    """Rows of a step. Small models gain from many (a step costs mostly its Python calls); for large
    ones more rows only make the padding of the last batch dearer."""
    lane_share: float
    """Attention over the whole of the shortest lane, as a share of a step's other multiplications.
    Longer lanes waste attention, shorter ones split batches; small models fill the split ones."""


def _sizing(parameters: int) -> Sizing:
    if parameters <= 8_000_000:
        return Sizing(512, 0.04)
    return Sizing(128, 0.1) if parameters <= 64_000_000 else Sizing(64, 0.05)


def _shortest_lane(parameters: int, share: float, config: Any, head_dim: int) -> int:
    """The largest power of two, at least 16, at which attention stays within `share`."""
    per_position = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim
    fair = max(16, int(share * parameters / per_position))
    return 1 << (fair.bit_length() - 1)
