"""What torch compiles of megatron-core's layers: what lies between matrix products, but for
attention, which goes by the lengths of sequences.

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


def compile_layers(chunks: Iterable[GPTModel]) -> None:
    """Have torch compile each layer at its first call. Layers with experts stay as they are, since
    what an expert gets varies, and those of latent attention, which looks at lengths itself.
    """
    # Else a constant such as the epsilon of a norm is looked up at each call.
    torch._dynamo.config.specialize_float = True
    # megatron-core warns in the middle of a layer, and notes that it has.
    torch._dynamo.config.ignore_logging_functions.add(warnings.warn)
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    for chunk in chunks:
        if not chunk.config.multi_latent_attention:
            for layer in chunk.decoder.layers:
                if not isinstance(layer.mlp, MoELayer):
                    # Its hooks stay outside.
                    layer.forward = torch.compile(layer.forward, dynamic=True)


def compiled_layers(chunk: GPTModel) -> Iterator[nn.Module]:
    """Those of `compile_layers`."""
    return (layer for layer in chunk.decoder.layers if "forward" in vars(layer))
