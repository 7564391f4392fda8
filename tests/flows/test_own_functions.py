"""A run whose prompts, training and evaluation are functions of one's own, killed and resumed: it
ends with the bits of one that was left alone.
"""

from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

FUNCTIONS = '''
import torch


class Stride:
    """Every seventh row of the data."""

    def __init__(self, args):
        self.args, self.given = args, 0

    def get_samples(self, num_samples):
        rows = [(self.given + k) * 7 % self.args.rows for k in range(num_samples)]
        self.given += num_samples
        return [self.args.group(row) for row in rows]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def centred(args, samples):
    rewards = [s.get_reward_value(None) for s in samples]
    groups = {}
    for sample, reward in zip(samples, rewards):
        groups.setdefault(sample.group_index, []).append(reward)
    means = {index: sum(group) / len(group) for index, group in groups.items()}
    return rewards, [r - means[s.group_index] for s, r in zip(samples, rewards)]


def fading(args, rollout_data):
    pairs = zip(rollout_data["rewards"], rollout_data["loss_masks"])
    rollout_data["advantages"] = [n * 0.99 ** torch.arange(len(mask)) for n, mask in pairs]


def weigh(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **more):
    x = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
    weights = x.exp().clamp(max=args.tis_clip).detach()
    return pg_loss * weights, loss_masks, {"own_weight": weights}


def total(total_lengths, response_lengths, masks, per_token):
    return lambda losses: (losses * torch.cat(masks)).sum()


async def evaluate(args, rollout_id, data_source, evaluation=True):
    found = {}
    for name in data_source.names:
        groups = data_source.get_samples(name)[:3]
        found[name] = [await data_source.generate(name, group) for group in groups]
    return found
'''
SETTINGS = """
[algorithm]
custom_reward_post_process_path = "own.py:centred"
custom_advantage_function_path = "own.py:fading"
use_tis = true
custom_tis_function_path = "own.py:weigh"
custom_pg_loss_reducer_function_path = "own.py:total"
use_kl_loss = true
ref_update_interval = 2
[rollout]
data_source_path = "own.py:Stride"
[eval]
eval_function_path = "own.py:evaluate"
[tracking]
tensorboard = true
"""


@pytest.mark.slow
def test_it_goes_on_with_the_same_bits(sluice: Sluice, tmp_path: Path) -> None:
    below = short(tmp_path, iterations=5, more="state_interval = 3")
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
    for metrics in killed["metrics"]:
        # The policy was made the reference before iterations 2 and 4.
        assert (metrics["train/kl_loss"] == 0) == (metrics["iteration"] % 2 == 0)
        assert metrics["train/own_weight"] == pytest.approx(1.0, abs=1e-3)
    assert "eval/greedy" in killed["metrics"][2]
    assert sluice.json("verify", "killed")["ok"]
    assert list((Path(sluice.root) / "runs" / "killed" / "tensorboard").iterdir())
