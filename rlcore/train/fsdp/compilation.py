"""What torch compiles of the FSDP2 trainer's models: a layer, or of one with experts its
attention.
"""

from __future__ import annotations

import torch

from rlcore.images.model import decoder
from rlcore.train.fsdp.model import Policy
from rlcore.weights.experts import is_stacked


def compile_layers(policy: Policy) -> None:
    """Have torch fuse what lies between the matrix products of each decoder layer; they share the
    code that is made. What an expert gets varies, so experts stay as they are.
    """
    # Else a constant such as the epsilon of a norm is looked up at each call.
    torch._dynamo.config.specialize_float = True
    for layer in decoder(policy.lm.base_model).layers:
        sparse = any(is_stacked(f".{name}") for name, _ in layer.named_parameters())
        # A layer's hooks, which gather weights, stay outside.
        part = layer.self_attn if sparse else layer
        part.forward = torch.compile(part.forward, dynamic=True)
