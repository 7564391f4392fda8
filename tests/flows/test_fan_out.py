"""A run whose executions make several samples each, killed and resumed: it ends with the bits of
one that was left alone.
"""

from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

FUNCTIONS = '''
from copy import deepcopy

from rlcore.rollout.generate import apply_result


async def retells(args, sample, sampling_params):
    """An answer; from some seeds on, a second one to the first in place of the prompt."""
    first = deepcopy(sample)
    apply_result(first, await args.generate(sample.tokens, sampling_params))
    if sample.seed % 3 == 0:
        return first
    second = deepcopy(sample)
    second.tokens = [*sample.tokens, *first.response_tokens]
    apply_result(second, await args.generate(second.tokens, sampling_params))
    return [first, second]


def last_word(args, sample, *, rollout_id, evaluation):
    sample.metadata["hooked"] = [rollout_id, evaluation]
'''
SETTINGS = """
[algorithm]
loss_aggregation = "sequence_mean"
[rollout]
custom_generate_function_path = "own.py:retells"
sample_hook_paths = ["own.py:last_word"]
[train]
global_batch_size = 32
num_steps_per_rollout = 2
"""
ITERATIONS, EXECUTIONS = 5, 64


@pytest.mark.slow
def test_it_goes_on_with_the_same_bits(sluice: Sluice, tmp_path: Path) -> None:
    below = short(tmp_path, iterations=ITERATIONS, more="state_interval = 3")
    (tmp_path / "own.py").write_text(FUNCTIONS)
    config = tmp_path / "own.toml"
    config.write_text(f'extends = "{below}"\n{SETTINGS}')
    sluice("train", str(config), "--run-id", "calm")
    process = sluice.start("train", str(config), "--run-id", "killed")
    there = sluice.committed("killed", 2)
    wait_for(lambda: there.exists() or process.poll() is not None, 300)
    assert there.exists(), process.communicate()
    kill_tree(process.pid)
    process.wait(10)
    sluice("resume", "killed")
    calm, killed = sluice.json("show", "calm"), sluice.json("show", "killed")
    assert calm["state_sha256"] == killed["state_sha256"]
    assert [m["reward"] for m in calm["metrics"]] == [m["reward"] for m in killed["metrics"]]
    assert sluice.json("verify", "killed")["ok"]
    counts = sluice.json(
        "sql",
        "select iteration, count(*) samples, count(distinct (group_index, seed)) executions "
        "from samples where run_id = 'killed' group by iteration order by iteration",
    )
    assert [row["executions"] for row in counts] == [EXECUTIONS] * ITERATIONS
    assert all(EXECUTIONS < row["samples"] < 2 * EXECUTIONS for row in counts)
    assert "eval/greedy" in killed["metrics"][2]
