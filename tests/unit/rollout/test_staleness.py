"""The age of samples: counted, bounded, and what is too old begun anew."""

from dataclasses import replace

import pytest

from rlcore.config.tree import RolloutConfig
from rlcore.data import Dataset, Prompt
from rlcore.errors import EngineError
from rlcore.rollout.buffer import Group
from rlcore.rollout.staleness import is_too_old, staleness, staleness_metrics
from rlcore.rollout.supply import RolloutRequest, Supply
from rlcore.sample import Sample, Status


def sample(*versions: str, status: Status = Status.ABORTED) -> Sample:
    made = Sample(prompt_id="p", prompt="7=", tokens=[7, 8, 5], response_length=1, status=status)
    return replace(made, rollout_log_probs=[-0.5], weight_versions=list(versions))


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    assert [staleness(one, 5) for one in (sample("5"), sample("3", "5"), sample())] == [0, 2, 0]
    assert staleness(sample("default"), 5) == 0
    assert is_too_old([sample("5"), sample("2", "4")], 5, 2)
    assert not is_too_old([sample("3")], 5, 2)
    assert not is_too_old([sample("0")], 5, None)


def test_a_batch_says_how_old_it_is_or_is_refused() -> None:
    batch = [sample("5"), sample("3"), sample("4", "5")]
    assert staleness_metrics(batch, 5, None) == {}
    found = staleness_metrics(batch, 5, 2)
    assert found == {"rollout/staleness/mean": 1.0, "rollout/staleness/max": 2.0}
    with pytest.raises(EngineError, match=r"versions 3, the oldest 2 .*max_staleness = 1"):
        staleness_metrics(batch, 5, 1)


def test_what_the_buffer_holds_too_long_is_begun_anew() -> None:
    config = RolloutConfig(
        rollout_batch_size=2,
        over_sampling_batch_size=4,
        partial_rollout=True,
        n_samples_per_prompt=2,
        max_staleness=2,
    )
    rows = [Prompt(f"p{k}", k, f"{k}=", tokens=[k, 9]) for k in range(4)]
    data = Dataset("d", rows)
    old = Group((0, 0), [sample("1", "2"), sample("2")])
    fresh = Group((0, 1), [sample("2"), sample("3")])
    cursor = {"next_epoch": 0, "next_offset": 2, "size": 4}
    request = RolloutRequest(4, 0, False, cursor, "4", [old, fresh])
    supply = Supply(request, data, None, config)
    groups = supply.first()
    assert (supply.too_old, supply.from_buffer) == (1, 2)
    assert [s.status for s in groups[0].samples] == [Status.PENDING] * 2
    assert [s.tokens for s in groups[0].samples] == [[0, 9]] * 2
    assert groups[1].samples == fresh.samples
