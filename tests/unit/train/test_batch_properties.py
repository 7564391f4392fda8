"""From stored parts to micro-batches, whatever the batch: every sample that may be trained is in
exactly one, whole, within the cap, with its mask where its tokens are predicted.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import Stored

from rlcore.algorithms.packing import pack
from rlcore.sample import Sample, Status

LEFT_OUT = ("samples_not_kept", "samples_failed", "samples_removed", "samples_without_tokens")


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    response = draw(st.integers(1, 9))
    mask = st.none() | st.lists(st.integers(0, 1), min_size=response, max_size=response)
    return {
        "prompt": draw(st.integers(1, 6)),
        "response": response,
        "mask": draw(mask),
        "reward": draw(st.none() | st.sampled_from([0.0, 0.5, 1.0])),
        "keep": draw(st.booleans() | st.just(True)),
        "removed": draw(st.sampled_from([False, False, False, True])),
        "failed": draw(st.sampled_from([False, False, False, True])),
        "log_probs": draw(st.sampled_from([True, True, True, False])),
    }


def sample_of(i: int, row: dict[str, Any], each: int) -> Sample:
    # Tokens that no other sample has, so that each is known by them.
    tokens = [1000 * i + k + 1 for k in range(row["prompt"] + row["response"])]
    return Sample(
        group_index=i // each,
        index=i,
        prompt_id=f"p{i // each}",
        prompt="x",
        tokens=tokens,
        response="y",
        response_length=row["response"],
        loss_mask=row["mask"],
        remove_sample=row["removed"],
        rollout_log_probs=[-0.25 - i] * row["response"] if row["log_probs"] else None,
        status=Status.FAILED if row["failed"] else Status.COMPLETED,
    )


def mask_of(row: dict[str, Any]) -> list[int]:
    return [1] * row["response"] if row["mask"] is None else row["mask"]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.lists(rows(), min_size=2, max_size=14),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(4, 40),
)
def test_every_trainable_sample_is_in_exactly_one_micro_batch(
    batch: list[dict[str, Any]], each: int, world: int, steps: int, cap: int
) -> None:
    samples = [sample_of(i, row, each) for i, row in enumerate(batch)]
    with TemporaryDirectory() as folder:
        stored = Stored(
            Path(folder),
            samples,
            rewards=[row["reward"] for row in batch],
            keep=[row["keep"] for row in batch],
        )
        shares = [
            stored.load(rank, world, num_steps_per_rollout=steps, max_tokens_per_gpu=cap)
            for rank in range(world)
        ]
    wanted = {
        i
        for i, row in enumerate(batch)
        if row["keep"] and row["reward"] is not None and any(mask_of(row))
        if not (row["failed"] or row["removed"])
    }
    found: list[int] = []
    for rank, share in enumerate(shares):
        assert share.metrics == shares[0].metrics
        assert [step.totals for step in share.steps] == [s.totals for s in shares[0].steps]
        for step, first in zip(share.steps, shares[0].steps, strict=True):
            assert len(step.micro_batches) == len(first.micro_batches), rank
            for micro in step.micro_batches:
                assert len(micro) <= 1 or sum(len(s.tokens) for s in micro) <= cap
                packed = pack(micro, step.totals, "token_mean") if micro else None
                start = 0
                for sequence in micro:
                    i = int(sequence.tokens[0]) // 1000
                    found.append(i)
                    assert list(sequence.tokens) == samples[i].tokens
                    assert packed is not None
                    length, response = len(sequence.tokens), batch[i]["response"]
                    here = packed.loss_mask[start : start + length].tolist()
                    # A token's mask stands where the token before it is: there it is predicted.
                    expected = [False] * (length - 1 - response) + [
                        *map(bool, mask_of(batch[i])),
                        False,
                    ]
                    assert here == expected
                    targets = packed.targets[start : start + length].tolist()
                    assert targets[:-1] == samples[i].tokens[1:]
                    start += length
    assert sorted(found) == sorted(wanted)
    assert sum(shares[0].metrics[name] for name in LEFT_OUT) == len(batch) - len(wanted)
    tokens = sum(sum(mask_of(batch[i])) for i in wanted)
    assert sum(step.totals.tokens for step in shares[0].steps) == tokens
    assert sum(step.totals.sequences for step in shares[0].steps) == len(wanted)
    assert shares[0].rollout_log_probs == all(batch[i]["log_probs"] for i in wanted)
