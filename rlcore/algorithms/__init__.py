"""The mathematics of the training step: pure functions, one frozen dataclass in, one out.

Whoever reads them in the order of a training step reads: `advantages` (rewards of the whole batch
to one number a sample), `plan` (who trains what), `packing` (sequences to tensors), `aggregate`
(what a token weighs), `logprobs`, `kl`, `returns` (one number a token), `off_policy`, `losses`, and
`values` (the critic's).

Invariants:
- Nothing here imports ray, sglang, megatron or transformers; nothing here knows of ranks other than
  by a count, of files, or of the configuration tree.
- `advantages`, `plan`, `flops`, `logit_memory` and `aggregate` need no torch, so that the driver
  may call them. This file therefore imports nothing: import the module that you need.
"""
