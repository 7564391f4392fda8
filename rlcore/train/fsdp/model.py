"""The policy: a transformers language model that answers log-probs, wrapped by FSDP2.

FSDP shards the weights between uses and gathers them around each module's `forward`. So the output
layer must be applied inside a `forward`: `Policy` goes from token ids to log-probs in its own,
where the weight of the output layer (often that of the embedding) is whole, and float32 logits of
all tokens never exist at once.

Invariants:
- Parameters are float32 DTensors, sharded over dimension 0; `precision = "bfloat16"` computes in
  bfloat16 and reduces gradients in float32.
- Weights are sharded again after every forward, or at the end of a block that keeps them gathered:
  no pass ever sees weights from before an optimizer step.
- Nothing is random: dropout is off, since the policy that is trained must be the one that sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.logprobs import chunked_log_probs
from rlcore.algorithms.packing import PackedBatch, PackedImages, TrainSequence, pack
from rlcore.errors import ConfigError
from rlcore.images.model import (
    Picture,
    attend,
    attention_of,
    auto_class,
    blank,
    decoder,
    embed,
    features,
    sees,
)
from rlcore.images.trial import trial
from rlcore.routing import Routing
from rlcore.train.fsdp.attention import ATTENTION, SequenceLayout, register
from rlcore.train.fsdp.context import (
    CONTEXT_ATTENTION,
    Context,
    ContextLayout,
    Share,
    register_context,
)
from rlcore.train.fsdp.experts import ExpertLoad
from rlcore.train.fsdp.lone import reduce_in_place
from rlcore.train.fsdp.on_policy import engine_log_probs
from rlcore.train.offload import own_storages
from rlcore.train.trainer import DType
from rlcore.weights.experts import by_expert, is_stacked

UNIT_NUMBERS = 100_000_000
"""Parameters that a unit of FSDP has at least."""
PROBE_TOLERANCE = 1e-3
"""Largest difference to the model's own logits, in float32, that counts as rounding."""


class Policy(nn.Module):
    """A causal language model, which may see images, from token ids to log-probs."""

    def __init__(self, lm: Any, context: Context | None = None) -> None:
        """`context`: the ranks that share each micro-batch, where they do."""
        super().__init__()
        self.lm = lm
        self.expert_load = ExpertLoad(lm)
        self.routing = Routing(getattr(decoder(lm.base_model), "layers", ()))
        self.context = context
        self.as_sglang = False
        """Whether it computes what SGLang does; see `rlcore.train.fsdp.on_policy`."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SequenceLayout | ContextLayout,
        rows: Tensor,
        targets: Tensor | None,
        temperature: float,
        images: PackedImages | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of the next token at some positions of a packed micro-batch.

        Args:
            input_ids, position_ids: [T], sequences end to end.
            rows: int64 [M], the positions to answer.
            targets: int64 [M], the next token of each; None: all logits are asked for.
            images: of the sequences.

        Returns:
            Log-probs [M] and entropies [M], float32; or logits [M, V], float32, and None.
        """
        decoded = hidden_states(self.lm.base_model, input_ids, position_ids, layout, images)
        hidden = decoded.index_select(0, rows)
        weight = self.lm.get_output_embeddings().weight
        if self.as_sglang and targets is not None:
            return engine_log_probs(hidden, weight, targets, temperature)
        if targets is None:
            return (hidden.to(weight.dtype) @ weight.t()).float(), None
        return chunked_log_probs(hidden, weight, targets, temperature)

    def score(self, batch: PackedBatch, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`forward` of a packed micro-batch that is on the model's device; `rows` likewise."""
        self.routing.give(batch.experts)
        if self.context is not None:
            share = self._share(self.context, batch, rows)
            return self._score_share(share, batch.targets, temperature)
        layout = SequenceLayout.of(batch.lengths, batch.input_ids.device)
        targets = batch.targets.index_select(0, rows)
        return cast(
            tuple[Tensor, Tensor],
            self(
                batch.input_ids,
                batch.position_ids,
                layout,
                rows,
                targets,
                temperature,
                batch.images,
            ),
        )

    def _share(self, context: Context, batch: PackedBatch, rows: Tensor) -> Share:
        share = context.share(batch, rows)
        self.expert_load.first = share.real
        return share

    def _score_share(
        self, share: Share, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The same by all ranks of a context, each of its share."""
        log_probs, entropy = self(
            share.input_ids,
            share.position_ids,
            share.layout,
            share.rows,
            share.of(targets),
            temperature,
        )
        return share.gather(log_probs), share.gather(entropy)

    def logits(self, batch: PackedBatch) -> Tensor:
        """Logits [T, V] at all positions of a packed micro-batch, all of them at once."""
        self.routing.give(batch.experts)
        rows = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        if self.context is not None:
            share = self._share(self.context, batch, rows)
            own = self(share.input_ids, share.position_ids, share.layout, share.rows, None, 1.0)
            return share.gather(own[0])
        layout = SequenceLayout.of(batch.lengths, batch.input_ids.device)
        found = self(batch.input_ids, batch.position_ids, layout, rows, None, 1.0, batch.images)
        return cast(Tensor, found[0])

    def routed(self, batch: PackedBatch) -> PackedBatch:
        """The micro-batch that was scored last, with the experts chosen in that, where they are to
        be replayed.
        """
        if not self.routing.watches or batch.experts is not None:
            return batch
        return replace(batch, experts=self.routing.seen())

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names that transformers gives them; one that is tied comes once."""
        yield from self.lm.named_parameters()

    def fixed(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds beside `weights` and nothing trains: biases of routers that only
        the choice of experts sees.
        """
        known = {name for name, _ in self.lm.named_parameters(remove_duplicate=False)}
        return ((n, tensor) for n, tensor in self.lm.state_dict().items() if n not in known)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of `weights` that are not frozen: what a state holds."""
        return ((name, p) for name, p in self.weights() if p.requires_grad)


def hidden_states(
    base: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: SequenceLayout | ContextLayout,
    images: PackedImages | None,
) -> Tensor:
    """[T, hidden] of a packed micro-batch by a model without its output layer.

    A vision tower is passed through whatever the micro-batch holds, since its weights are gathered
    and their gradients reduced by all ranks together: where there are no images, with a blank one
    whose features are multiplied by 0.
    """
    inputs: dict[str, Any] = {"position_ids": position_ids[None]}
    if not sees(base):
        inputs["input_ids"] = input_ids[None]
    elif images is None:
        nothing = sum(part.sum() * 0.0 for part in features(base, blank(base)))
        inputs["inputs_embeds"] = base.get_input_embeddings()(input_ids[None]) + nothing
    else:
        picture = Picture(images.pixel_values, images.grids)
        inputs["inputs_embeds"], more = embed(
            base, input_ids[None], images.at, [picture], images.take
        )
        inputs |= {"position_ids": images.positions[:, None], **more}
    decoded = decoder(base)(**inputs, use_cache=False, layout=layout)
    return cast(Tensor, decoded.last_hidden_state[0])


def load_policy(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    checkpointing: bool = False,
    context: Context | None = None,
) -> Policy:
    """Read a Hugging Face folder into float32 parameters on the CPU.

    Args:
        folder: of the model.
        trust_remote_code: run code that comes with it.
        checkpointing: compute activations again in backward.
        context: the ranks that share each micro-batch; all of them load.

    Raises:
        ConfigError: the folder is no causal language model, lacks weights, or is one that this
            trainer would compute wrongly.
    """
    from transformers.utils.logging import disable_progress_bar

    register()
    register_context()
    disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} has no config.json; give a Hugging Face model folder"
        )
    lm: Any
    try:
        lm, loaded = auto_class(folder).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=attention_of(folder, ATTENTION),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: {folder} does not load as a causal language model: {error}"
        ) from error
    missing = [*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])]
    if missing:
        # transformers would go on with random numbers in their place.
        raise ConfigError(
            f"model.path: {folder} lacks weights, or has them in another shape: "
            f"{', '.join(sorted(missing)[:5])} ({len(missing)} in all)"
        )
    _check_expert_names(lm, folder)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    lm.config.use_cache = False
    if context is not None and sees(lm.base_model):
        raise ConfigError(
            f"model.path: {folder} sees images, whose tokens train.context_parallel_size = "
            f"{context.size} does not split; set it to 1"
        )
    policy = Policy(lm, context)
    _probe(policy, folder)
    if checkpointing:
        # Under its old name in transformers 5.12; neither re-enters autograd by default.
        getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)()
        # transformers recomputes only in training mode, which changes nothing else without dropout.
        policy.train()
    return policy


def shard(
    module: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, precision: DType
) -> None:
    """Apply FSDP2 to the decoder layers and the rest; moves the parameters to the mesh's device."""
    if mesh.device_type == "cpu":
        own_storages(module)
    dtype = torch.bfloat16 if precision == "bfloat16" else None
    mixed = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32 if dtype else None,
        # Between layers such a model holds float32.
        cast_forward_inputs=not getattr(module, "as_sglang", False),
    )
    for unit in units(layers):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=mixed)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=mixed)
    if mesh.size() == 1:
        reduce_in_place(module.modules())
    # Buffers (rotary frequencies) are not FSDP's to move.
    device = current_device(mesh.device_type)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """What a pass through the module gathers stays so for the block's other passes; no weight may
    change meanwhile.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.set_reshard_after_backward(True, recurse=False)
            part.reshard()


def units(layers: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Layers that are gathered together: neighbours of a kind, so many that gathering them takes
    longer than asking for it does.
    """
    unit: list[nn.Module] = []
    numbers = 0
    for layer in layers:
        if unit and (numbers >= UNIT_NUMBERS or type(layer) is not type(unit[0])):
            yield unit
            unit, numbers = [], 0
        unit.append(layer)
        numbers += sum(p.numel() for p in layer.parameters())
    if unit:
        yield unit


def current_device(kind: str) -> torch.device:
    """`cpu`, or this process's GPU."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _check_expert_names(lm: nn.Module, folder: Path) -> None:
    """What is exported must have the names that the model came with."""
    stacked = [(n, p) for n, p in lm.named_parameters() if p.ndim == 3 and ".experts." in n]
    if not stacked:
        return
    there: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            there.update(opened.keys())
    for name, parameter in stacked:
        if not is_stacked(name) or any(n not in there for n, _ in by_expert(name, parameter)):
            raise ConfigError(
                f"model.path: {folder} names its experts in a way that the fsdp trainer does not "
                f"know ({name}); it knows mlp.experts.0.gate_proj.weight and so on"
            )


@torch.no_grad()
def _probe(policy: Policy, folder: Path) -> None:
    """Compare with the model's own logits: packed sequences against each alone.

    Catches whatever the short way round the model's own `forward` would lose: a scaled or capped
    output, a bias, attention that ignores the layout, positions or features of images.
    """
    lm = policy.lm
    model_type = getattr(lm.config, "model_type", "?")
    if not hasattr(decoder(lm.base_model), "layers") or lm.get_output_embeddings() is None:
        raise ConfigError(
            f"model.path: {folder} is of type {model_type!r}, which the fsdp trainer does not know"
        )
    vocab = lm.get_input_embeddings().weight.shape[0]
    given: list[tuple[TrainSequence, dict[str, Tensor]]] = [
        (TrainSequence([i * 7 % vocab for i in range(n)], n - 1, trainable=False), {})
        for n in (5, 3)
    ]
    if sees(lm.base_model):
        made = trial(lm)
        length = len(made.tokens)
        seen = TrainSequence(made.tokens, length - 1, images=made.images, trainable=False)
        given.insert(1, (seen, made.forward))
    attend(lm, "eager")
    expected = [
        lm(input_ids=torch.tensor([s.tokens]), use_cache=False, **more).logits[0].log_softmax(-1)
        for s, more in given
    ]
    attend(lm, ATTENTION if policy.context is None else CONTEXT_ATTENTION)
    packed = pack([s for s, _ in given], Totals(0, 0), "token_mean")
    wanted, targets = torch.cat(expected).float().min(-1)
    got, _ = policy.score(replace(packed, targets=targets), torch.arange(len(targets)), 1.0)
    gap = (got - wanted).abs().max().item()
    if not gap <= PROBE_TOLERANCE:
        raise ConfigError(
            f"model.path: {folder} is of type {model_type!r}, whose log-probs the fsdp trainer "
            f"would get wrong by {gap:.3g} (it knows decoders whose output layer is one matrix "
            "product)"
        )
