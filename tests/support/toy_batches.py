"""Random samples of a tiny vocabulary, and batches of them for any number of ranks."""

import random

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import TrainSequence
from rlcore.algorithms.plan import plan
from rlcore.train.trainer import TrainBatch, TrainStep

VOCAB = 45
PADDING = 0
"""Of the tests' models."""


def random_sequences(count: int, seed: int = 0, *, padding: bool = False) -> list[TrainSequence]:
    """Samples of mixed lengths, some with a masked stretch, with `padding` some of its id."""
    draw = random.Random(seed)
    sequences = []
    for k in range(count):
        prompt, response = draw.randint(1, 6), draw.randint(1, 12)
        tokens = [draw.randrange(2, VOCAB) for _ in range(prompt + response)]
        if padding and k % 4 == 1:
            tokens[0] = PADDING
        sequences.append(
            TrainSequence(
                tokens=tokens,
                response_length=response,
                loss_mask=[int(draw.random() < 0.7) for _ in range(response)]
                if k % 3 == 0
                else None,
                advantages=draw.gauss(0, 1),
                rollout_log_probs=[-3.8 + 0.1 * draw.random() for _ in range(response)],
            )
        )
    return sequences


def shares(
    sequences: list[TrainSequence],
    world: int,
    *,
    iteration: int = 0,
    num_steps: int = 1,
    micro_batches: int | None = None,
    max_tokens: int = 10_000,
) -> list[TrainBatch]:
    """The same samples cut for `world` ranks."""
    lengths = [len(s.tokens) for s in sequences]
    whole = plan(
        lengths,
        max_tokens=max_tokens,
        dp_size=world,
        num_steps=num_steps,
        fixed_micro_batches=micro_batches,
    )
    return [
        TrainBatch(
            iteration=iteration,
            steps=tuple(
                TrainStep(
                    tuple(tuple(sequences[i] for i in m.samples) for m in step.ranks[rank]),
                    Totals.of(sequences[i].trainable_tokens for i in step.samples),
                )
                for step in whole.steps
            ),
            samples=len(sequences),
            tokens=sum(lengths),
            rollout_log_probs=True,
        )
        for rank in range(world)
    ]
