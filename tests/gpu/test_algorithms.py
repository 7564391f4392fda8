"""Every advantage estimator and loss trains on a GPU, and what it committed verifies."""

from pathlib import Path

import pytest
from real_runs import REPO, Sluice

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WAYS = {
    "grpo": {"use_kl_loss": True, "kl_loss_coef": 0.01, "entropy_coef": 0.001},
    "gspo": {},
    "cispo": {},
    "ppo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
}
COMPILED = ("grpo", "ppo")
"""The policy is compiled alike for every estimator; the critic of `ppo` is a model of its own."""


@pytest.mark.parametrize("estimator", WAYS)
def test_an_estimator_trains_on_a_gpu(estimator: str, tmp_path: Path) -> None:
    sluice = Sluice(tmp_path / "root", cwd=tmp_path)
    settings = {
        "train.num_iterations": 4,
        "train.global_batch_size": 256,  # two steps an iteration: the second one is off-policy
        "train.num_steps_per_rollout": 2,
        "cluster.device": "cuda",
        "cluster.colocate": True,
        "algorithm.advantage_estimator": estimator,
        "train.torch_compile": estimator in COMPILED,
    } | {f"algorithm.{name}": value for name, value in WAYS[estimator].items()}
    told = {k: str(v).lower() if isinstance(v, bool) else v for k, v in settings.items()}
    sets = [part for name, value in told.items() for part in ("--set", f"{name}={value}")]
    config = REPO / "examples" / "quickstart" / "run.toml"
    sluice("train", str(config), "--run-id", "g", *sets, timeout=300)

    metrics = sluice.json("show", "g")["metrics"]
    print([(m["reward"], m["train/grad_norm"]) for m in metrics])
    assert len(metrics) == 4
    assert all(0 < m["train/grad_norm"] < 1e3 for m in metrics)
    assert all(m["train/train_rollout_logprob_abs_diff"] < 1e-3 for m in metrics)
    assert sluice.json("verify", "g")["ok"]
