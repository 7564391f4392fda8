"""A rollout batch in a store, with rewards and selection, as the train stage reads it."""

from pathlib import Path
from typing import Any

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.images.processor import ImageProcessor
from rlcore.sample import Sample
from rlcore.store.batch import (
    SCORES,
    SELECTION,
    rows_to_table,
    samples_to_table,
    write_table,
)
from rlcore.store.objects import Objects
from rlcore.train.batch import load_batch
from rlcore.train.trainer import BatchFiles, TrainBatch


class Stored:
    """A batch in a store; `rewards`, `keep` and `status` by row."""

    def __init__(self, root: Path, samples: list[Sample], **columns: Any) -> None:
        self.objects = Objects.open(root)
        count = len(samples)
        rewards = columns.get("rewards", [float(i % 3) for i in range(count)])
        keep = columns.get("keep", [True] * count)
        status = columns.get("status", ["completed"] * count)
        common = [
            {"row": i, "group_index": s.group_index, "index": i} for i, s in enumerate(samples)
        ]
        scores = [
            c | {"prompt_id": "p", "reward": r, "status": t, "details": None, "error": None}
            for c, r, t in zip(common, rewards, status, strict=True)
        ]
        selection = [
            c | {"reward": r, "keep": k, "reason": None}
            for c, r, k in zip(common, rewards, keep, strict=True)
        ]
        half = count // 2
        self.files = BatchFiles(
            7,
            tuple(
                write_table(self.objects, f"rollout-{k}.parquet", samples_to_table(part))
                for k, part in enumerate((samples[:half], samples[half:]))
            ),
            (write_table(self.objects, "reward.parquet", rows_to_table(SCORES, scores)),),
            (write_table(self.objects, "filter.parquet", rows_to_table(SELECTION, selection)),),
        )

    def load(
        self,
        rank: int = 0,
        world: int = 1,
        algorithm: AlgorithmConfig | None = None,
        images: ImageProcessor | None = None,
        **train: Any,
    ) -> TrainBatch:
        """A rank's share; Dr.GRPO's advantages where no algorithm is given."""
        return load_batch(
            self.objects,
            self.files,
            train=TrainConfig(**train),
            algorithm=algorithm or AlgorithmConfig(grpo_std_normalization=False),
            rank=rank,
            world=world,
            images=images,
        )
