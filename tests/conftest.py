"""What holds for every test: one thread for numerics, no hub, no telemetry, no colours."""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    RAY_USAGE_STATS_ENABLED="0",
    NO_COLOR="1",
)
