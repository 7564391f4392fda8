"""What torch compiles of megatron-core's layers, in one piece: a layer, or of one with experts all
that comes before them.

Invariant: a layer's code serves micro-batches of any size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

BEFORE_EXPERTS = "_forward_attention"
"""megatron-core's method of a layer for all that comes before its feed-forward part."""
OF_EXPERTS = ("pre_mlp_layernorm", "mlp", "mlp_bda")
"""Its modules for the rest."""


def compile_layers(chunks: Iterable[GPTModel]) -> None:
    """Have torch compile each layer at its first call. What an expert gets varies, so experts stay
    as they are; and layers of latent attention, which looks at lengths itself.
    """
    # Else a constant such as the epsilon of a norm is looked up at each call.
    torch._dynamo.config.specialize_float = True
    # megatron-core warns in the middle of a layer, and notes that it has.
    torch._dynamo.config.ignore_logging_functions.add(warnings.warn)
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    for chunk in chunks:
        if not chunk.config.multi_latent_attention:
            for layer in chunk.decoder.layers:
                # Its hooks stay outside.
                part = BEFORE_EXPERTS if isinstance(layer.mlp, MoELayer) else "forward"
                setattr(layer, part, torch.compile(getattr(layer, part), dynamic=True))


def compiled_parts(chunk: GPTModel) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Layers of `compile_layers`, each with its modules that are within what is compiled."""
    for layer in chunk.decoder.layers:
        if "forward" in vars(layer):
            yield layer, list(layer.modules())
        elif BEFORE_EXPERTS in vars(layer):
            parts = (m for name, m in layer.named_children() if name not in OF_EXPERTS)
            yield layer, [module for part in parts for module in part.modules()]
