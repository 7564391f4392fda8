"""How many logits are there at once: what a training step keeps to, and its plan counts.

Invariant: nothing here needs torch.
"""

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Logits in a chunk when none is asked for: 128 MiB of float32, or 1 GiB of bfloat16, where fewer
rows would leave a GPU idle and add up gradients of the output layer more often.
"""
KEPT_SHARE = 1 / 16
"""Of a GPU's memory: logits that wait for backward. To compute them again takes a third of the
output layer's time, which at a vocabulary of 150,000 is much of a small model's.
"""
