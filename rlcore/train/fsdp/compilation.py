"""What torch compiles of the FSDP2 trainer's models."""

from __future__ import annotations

import torch

from rlcore.images.model import decoder
from rlcore.train.fsdp.model import Policy
from rlcore.weights.experts import is_stacked


def compile_layers(policy: Policy) -> None:
    """Have torch fuse what lies between the matrix products of each decoder layer; they share the
    code that is made. Layers with experts stay as they are, since what an expert gets varies.
    """
    if any(is_stacked(name) for name, _ in policy.weights()):
        return
    # Else a constant such as the epsilon of a norm is looked up at each call.
    torch._dynamo.config.specialize_float = True
    for layer in decoder(policy.lm.base_model).layers:
        # Its hooks, which gather weights, stay outside.
        layer.forward = torch.compile(layer.forward, dynamic=True)
