"""Weights of a megatron-core model on this rank: in from Hugging Face's, and what each holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from rlcore.errors import DataError
from rlcore.models.architecture import Architecture
from rlcore.weights.megatron import EXPERT, LAYERS, LOCAL_NAMES, Rule, rules

ReadTensor = Callable[[str], Tensor]
"""A Hugging Face tensor by name."""
ALSO_KEPT = ("_extra_state", "local_tokens_per_expert")
"""Ends of names in a module's state that are no weights."""


@torch.no_grad()
def load_weights(model: GPTModel, arch: Architecture, read: ReadTensor) -> None:
    """Fill this rank's part of a model; reads what it needs, a tensor at a time.

    Raises:
        DataError: a tensor of the model is filled by none, or has another shape.
    """
    targets = held_tensors(model)
    for rule, name in held_rules(model, arch):
        target = targets.pop(name, None)
        if target is None:
            raise DataError(f"the Megatron model has no {name} for {rule.megatron}")
        target.copy_(own_share(rule, read, target))
    if targets:
        raise DataError(f"no weights are there for {', '.join(sorted(targets))}")


@torch.no_grad()
def named_weights(model: GPTModel, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Weights of this rank's layers and experts by Hugging Face name, whole: gathered over
    tensor-parallel ranks, which must all call it.
    """
    targets = held_tensors(model)
    for rule, name in held_rules(model, arch):
        yield from united(rule, targets[name])


def own_share(rule: Rule, read: ReadTensor, target: Tensor) -> Tensor:
    """What this rank has of Megatron's tensor, of Hugging Face's.

    Raises:
        DataError: its shape is not that of `target`.
    """
    whole = rule.join([read(spec.name) for spec in rule.hf])
    group = dividing_group(rule)
    if rule.is_padded:
        whole = pad_rows(whole, target.shape[0] * group.size())
    # Transformer Engine has some projections whole on every rank.
    same = whole.shape == target.shape
    own = whole if same else rule.share(whole, group.rank(), group.size())
    if own.shape != target.shape:
        raise DataError(
            f"{rule.megatron} has shape {list(own.shape)} on this rank, and the Megatron model "
            f"has {list(target.shape)}"
        )
    return own


def united(rule: Rule, own: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's tensors, whole, of what tensor-parallel ranks have, which must all call it."""
    shares = [own.contiguous()]
    if is_share(rule, own):
        group = dividing_group(rule)
        shares = [torch.empty_like(shares[0]) for _ in range(group.size())]
        torch.distributed.all_gather(shares, own.contiguous(), group=group)
    for spec, part in zip(rule.hf, rule.split(rule.unite(shares)), strict=True):
        yield spec.name, part


def is_share(rule: Rule, own: Tensor) -> bool:
    """Whether a tensor is this rank's part of Megatron's, and not the whole."""
    if rule.divide is None or dividing_group(rule).size() == 1:
        return False
    return tuple(own.shape) != rule.shape


def dividing_group(rule: Rule) -> torch.distributed.ProcessGroup:
    """The ranks that may have a part each."""
    if rule.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def held_tensors(model: GPTModel) -> dict[str, Tensor]:
    """Parameters and router biases of this rank, by the names of its modules."""
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and not name.endswith(ALSO_KEPT)
    }


def held_rules(model: GPTModel, arch: Architecture) -> Iterator[tuple[Rule, str]]:
    """The rules of what lies on this rank, with the names of its modules."""
    layers = {layer.layer_number - 1: k for k, layer in enumerate(model.decoder.layers)}
    ranks = parallel_state.get_expert_model_parallel_world_size()
    here = parallel_state.get_expert_model_parallel_rank()
    each = arch.num_experts // ranks
    names = {} if model_has_engine(model) else LOCAL_NAMES
    for rule in rules(arch):
        if rule.layer is None:
            yield from _outside(model, arch, rule)
        elif rule.layer in layers and (rule.expert is None or rule.expert // each == here):
            own = rule.megatron.removeprefix(f"{LAYERS}.{rule.layer}.")
            if rule.expert is not None:
                stored = EXPERT.format(e=rule.expert)
                own = own.replace(stored, f"mlp.experts.local_experts.{rule.expert % each}")
            yield rule, f"{LAYERS}.{layers[rule.layer]}.{names.get(own, own)}"


def _outside(model: GPTModel, arch: Architecture, rule: Rule) -> Iterator[tuple[Rule, str]]:
    """The embedding on a pipeline's first stage, and all else outside of layers on its last."""
    if rule.megatron != "embedding.word_embeddings.weight":
        if model.post_process:
            yield rule, rule.megatron
    elif model.pre_process:
        yield rule, rule.megatron
    elif model.post_process and arch.tie_word_embeddings:
        # The last stage has its own copy to compute logits with.
        yield rule, "output_layer.weight"


def model_has_engine(model: GPTModel) -> bool:
    """Whether a model is made of Transformer Engine's layers."""
    return any(name.endswith("layer_norm_weight") for name, _ in model.named_parameters())


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with rows of zeros behind it, `rows` in all."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))
