"""The FSDP2 trainer: transformers models, sharded layer by layer over 1..N ranks.

`model` builds the policy, `attention` lets it see packed sequences, `optimizer` steps it, `loop`
goes through the steps of a batch, `state` saves and loads, and `trainer` ties them into the
`Trainer` protocol.

Invariants: the master weights and AdamW's moments are float32; on a CPU the same state and batch
give the same new state bit for bit, in any process.
"""
