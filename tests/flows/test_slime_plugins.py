"""A run whose generate, reward and filter functions are slime's, unmodified: it trains."""

from pathlib import Path

import pytest
from real_runs import Sluice, short

PLUGINS = Path(__file__).parents[1] / "unit" / "slime" / "plugins"


@pytest.mark.slow
def test_a_run_trains_with_plugins_of_slime(sluice: Sluice, tmp_path: Path) -> None:
    config = tmp_path / "compat.toml"
    config.write_text(
        f'extends = "{short(tmp_path, iterations=2)}"\n'
        f'[reward]\ncustom_rm_path = "{PLUGINS}/search_agent.py:reward_func"\n'
        'reward_key = "score"\n'
        "[rollout]\nmax_response_len = 9\n"
        f'custom_generate_function_path = "{PLUGINS}/search_agent.py:generate"\n'
        f'rollout_sample_filter_path = "{PLUGINS}/filters.py:drop_cut_off"\n'
        f'[filter]\ndynamic_sampling_filter_path = "{PLUGINS}/filters.py:check_spread"\n'
        "[compat]\nslime = true\n[compat.args]\nmax_turns = 2\ndrop_cut_off = false\n"
    )
    printed = sluice("train", str(config), "--run-id", "plugins")
    assert "2 iterations committed" in printed
    turns = sluice.json(
        "sql", "select count(*) n from samples where list_sum(loss_mask) < response_length"
    )
    assert turns[0]["n"] == 128
    rewards = [m["reward"] for m in sluice.json("show", "plugins")["metrics"]]
    assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)
