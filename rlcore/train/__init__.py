"""Training the policy: the `Trainer` protocol, the data it is given, and its implementations.

`trainer` holds the protocol and its records, `batch` turns committed Parquet rows into a rank's
share of a `TrainBatch`, `fsdp` trains Hugging Face models as they are.
"""
