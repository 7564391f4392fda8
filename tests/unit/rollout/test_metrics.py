"""Figures of rollouts and evaluations."""

from itertools import combinations

import pytest

from rlcore.config.tree import EvalDataset
from rlcore.rollout.evaluate import eval_metrics
from rlcore.rollout.metrics import (
    correct_length_metrics,
    pass_at_k,
    reward_metrics,
    rollout_metrics,
)
from rlcore.rollout.rewards.protocol import Score
from rlcore.sample import Sample, Status


def sample(length: int, group: int = 0, status: Status = Status.COMPLETED) -> Sample:
    return Sample(
        group_index=group,
        tokens=[1] * (length + 2),
        response_length=length,
        status=status,
        prefix_cache_info={"cached_tokens": 1, "total_prompt_tokens": 2},
    )


def test_rollout_figures() -> None:
    batch = [sample(1), sample(3), sample(8, status=Status.TRUNCATED), sample(4)]
    batch[1].loss_mask = [1, 0, 0]
    found = rollout_metrics(batch, 2.0, num_gpus=4)
    assert found["rollout/response_len/mean"] == (1 + 1 + 8 + 4) / 4
    assert found["rollout/response_len/median"] == 2.5
    assert (found["rollout/response_len/max"], found["rollout/response_len/min"]) == (8, 1)
    assert found["rollout/truncated_ratio"] == 0.25
    assert found["rollout/prefix_cache_hit_rate"] == 0.5
    assert found["perf/tokens_per_gpu_per_sec"] == 16 / 2 / 4
    assert found["perf/longest_sample_tokens_per_sec"] == 4.0


def test_reward_figures_leave_out_what_has_no_reward() -> None:
    found = reward_metrics([[1.0, 0.0], [0.5, None], [1.0, 1.0], [0.0, 0.0, None], [None]])
    assert found["rollout/raw_reward"] == 3.5 / 7
    assert found["rollout/exact"] == 3 / 7
    assert found["reward/unscored"] == 3
    assert found["rollout/zero_std/count_1.0"] == 1
    assert found["rollout/zero_std/count_0.0"] == 1
    assert found["rollout/zero_std/count"] == 2
    assert reward_metrics([[None, None]]) == {"reward/unscored": 2.0}


def test_pass_rates_go_up_to_the_smallest_group() -> None:
    found = reward_metrics([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, None]])
    assert found["passrate/pass@1"] == (1 / 4 + 2 / 4) / 2
    assert found["passrate/pass@2"] == pytest.approx((1 - 3 / 6 + 1 - 1 / 6) / 2)
    assert found["passrate/pass@4"] == 1.0
    assert "passrate/pass@8" not in found
    odd = reward_metrics([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert [name for name in odd if "pass@" in name] == ["passrate/pass@1", "passrate/pass@2"]


def test_lengths_of_right_responses() -> None:
    found = correct_length_metrics([4, 1, 2, 3, 5])
    assert list(found.values()) == [2, 3, 4, 5]
    assert list(found) == [f"rollout/correct_length/p{p}" for p in (25, 50, 75, 100)]
    assert correct_length_metrics([]) == {}


def test_figures_of_turns_and_speculation_are_there_where_there_were_any() -> None:
    plain = rollout_metrics([sample(3), sample(5)], 1.0, num_gpus=1)
    assert not [name for name in plain if "multi_turn" in name or "spec_" in name]
    assert "perf/non_generation_time/mean" not in plain
    batch = [sample(3), sample(6)]
    batch[1].loss_mask = [1, 1, 0, 0, 0, 1]
    batch[0].weight_versions, batch[1].weight_versions = ["0"], ["0", "0"]
    batch[1].non_generation_time = 0.5
    batch[0].spec_info = {"accept_token_num": 3, "draft_token_num": 4, "verify_ct": 2}
    batch[1].spec_info = {"draft_token_num": 2, "verify_ct": 1, "completion_token_num": 6}
    found = rollout_metrics(batch, 2.0, num_gpus=1)
    assert found["multi_turn/raw_response_length/max"] == 6
    assert found["multi_turn/wo_obs_response_length/mean"] == 3
    assert found["multi_turn/round_number/mean"] == 1.5
    assert found["perf/non_generation_time/max"] == 0.5
    assert found["perf/effective_tokens_per_gpu_per_sec"] == 3
    assert found["rollout/spec_accept_rate"] == 0.5
    assert found["rollout/spec_accept_length"] == 2.0
    assert found["rollout/avg_cached_tokens_per_sample"] == 1
    assert found["rollout/total_lengths"] == (5 + 8) / 2


def test_a_long_response_that_repeats_itself_is_counted() -> None:
    batch = [sample(1) for _ in range(4)]
    batch[0].response = "again " * 2000
    batch[1].response = "again " * 100
    batch[2].response = "".join(str(n * n) for n in range(3000))
    assert rollout_metrics(batch, 1.0, num_gpus=1)["rollout/repetition_frac"] == 0.25


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    for n in range(1, 7):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations(range(n), k))
                share = sum(min(draw) < correct for draw in draws) / len(draws)
                assert pass_at_k(n, correct, k) == pytest.approx(share)


def test_evaluation_figures_count_solved_prompts() -> None:
    config = EvalDataset(name="d", path="x", n_samples_per_eval_prompt=4, pass_threshold=0.5)
    batch = [sample(2, group) for group in range(2) for _ in range(4)]
    scores = [Score(r) for r in (1.0, 0.0, 0.0, 0.5)] + [Score(r) for r in (0.0, 0.0, 0.0)]
    scores.append(Score(error="no"))
    found = eval_metrics(config, batch, scores)
    assert found["eval/d"] == 1.5 / 7
    assert found["eval/d/exact"] == 1 / 7
    assert found["eval/d/unscored"] == 1
    assert found["eval/d/pass@1"] == (0.5 + 0.0) / 2
    assert found["eval/d/pass@2"] == pytest.approx((5 / 6 + 0.0) / 2)
    assert found["eval/d/pass@4"] == 1.0, "only the prompt with four scores can be asked for four"
    assert "eval/d/pass@8" not in found
