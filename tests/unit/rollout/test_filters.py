"""Which groups are kept, and that everything dropped is counted."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import FilterConfig
from rlcore.errors import PluginError
from rlcore.rollout.filters import GroupRule, Scored, make_rule, nonzero_std, select
from rlcore.sample import Sample


def scored(*groups: list[float | None]) -> list[Scored]:
    flat = [(g, r) for g, rewards in enumerate(groups) for r in rewards]
    return [Scored(k, g, k, r) for k, (g, r) in enumerate(flat)]


def no_samples(group: list[Scored]) -> list[Sample]:
    raise AssertionError("this rule needs no samples")


def as_samples(group: list[Scored]) -> list[Sample]:
    return [
        Sample(group_index=s.group_index, index=s.index, prompt_id="p", reward=s.reward)
        for s in group
    ]


def custom(tmp_path: Path, body: str) -> GroupRule:
    file = tmp_path / "f.py"
    file.write_text(body)
    return make_rule(FilterConfig(dynamic_sampling_filter_path=f"{file}:f"), {"reward_key": None})


def test_without_a_filter_all_groups_are_kept() -> None:
    found = select(scored([0, 0], [1, 0]), make_rule(FilterConfig(), {}), no_samples)
    assert [r["keep"] for r in found.rows] == [True] * 4
    assert found.metrics == {
        "filter/groups": 2, "filter/groups_kept": 2, "filter/samples_kept": 4,
    }  # fmt: skip


def test_nonzero_std_drops_groups_of_equal_rewards_by_reason() -> None:
    rule = make_rule(FilterConfig(dynamic_sampling_filter_path="nonzero_std"), {})
    found = select(scored([0, 0], [1, 0], [0.1, 0.1], [1, 1], [0, 0]), rule, no_samples)
    assert [r["keep"] for r in found.rows] == [False, False, True, True] + [False] * 6
    assert [r["reason"] for r in found.rows[:3]] == ["zero_std_0.0", "zero_std_0.0", None]
    assert found.metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 2
    assert found.metrics["rollout/dynamic_filter/drop_zero_std_0.1"] == 1
    assert found.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 1
    assert (found.kept, found.metrics["filter/groups_kept"]) == (2, 1)


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [
        ([0.1] * 7, False),
        ([1e8, 1e8 + 1], True),
        ([0, 1e-6], False),
        ([0, 2e-6], True),
        ([3.0], False),
    ],
)
def test_the_spread_is_that_of_float64_with_ddof_1(rewards: list[float], keep: bool) -> None:
    assert nonzero_std(rewards).keep is keep


def test_samples_without_a_reward_are_never_kept() -> None:
    found = select(
        scored([1, None, 0], [None, None], [1, None], [None]),
        make_rule(FilterConfig(), {}),
        no_samples,
    )
    assert [r["keep"] for r in found.rows] == [True, False, True] + [False] * 5
    reasons = [r["reason"] for r in found.rows]
    assert reasons == [
        None, "unscored", None, "unscored", "unscored", "too_few_scored", "unscored", "unscored",
    ]  # fmt: skip
    assert found.metrics["rollout/dynamic_filter/drop_unscored"] == 2
    assert found.metrics["rollout/dynamic_filter/drop_too_few_scored"] == 1


def test_a_group_of_one_is_a_group() -> None:
    assert select(scored([1], [0]), make_rule(FilterConfig(), {}), no_samples).kept == 2


def test_everything_dropped_is_a_valid_selection() -> None:
    rule = make_rule(FilterConfig(dynamic_sampling_filter_path="nonzero_std"), {})
    found = select(scored([1, 1], [0, 0]), rule, no_samples)
    assert found.kept == 0
    assert len(found.rows) == 4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("samples[0].group_index == 0", "filter"),
        ("(samples[0].group_index == 0, 'dull')", "dull"),
        ("SimpleNamespace(keep=samples[0].group_index == 0, reason='flat')", "flat"),
        ("np.bool_(samples[0].group_index == 0)", "filter"),
    ],
)
def test_custom_verdicts_of_all_kinds(tmp_path: Path, answer: str, reason: str) -> None:
    rule = custom(
        tmp_path,
        "import numpy as np\nfrom types import SimpleNamespace\n"
        "def f(args, samples, **kwargs):\n"
        f"    assert args.reward_key is None\n    return {answer}\n",
    )
    found = select(scored([1, 0], [1, None, 0]), rule, as_samples)
    assert [r["keep"] for r in found.rows] == [True, True, False, False, False]
    assert [r["reason"] for r in found.rows[2:]] == [reason, "unscored", reason]
    assert found.metrics[f"rollout/dynamic_filter/drop_{reason}"] == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "returned None on group 0 (prompt p); return a bool"),
        ("0.5", "returned 0.5"),
        ("1 / 0", "raised ZeroDivisionError: division by zero on group 0"),
    ],
)
def test_custom_faults_are_told(tmp_path: Path, answer: str, said: str) -> None:
    rule = custom(tmp_path, f"def f(args, samples):\n    return {answer}\n")
    with pytest.raises(PluginError) as caught:
        select(scored([1, 0]), rule, as_samples)
    assert said in str(caught.value)
    assert "filter.dynamic_sampling_filter_path" in str(caught.value)


def test_a_custom_filter_must_take_what_it_is_given(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"called as \(args, samples\)"):
        custom(tmp_path, "def f(samples): return True")


def test_the_filter_of_a_typo_is_a_plugin_error() -> None:
    config: Any = FilterConfig(dynamic_sampling_filter_path="nonzero_sdt")
    with pytest.raises(PluginError, match="write module:function"):
        make_rule(config, {})
