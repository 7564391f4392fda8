"""A policy that computes as SGLang does: near the usual one, and with its gradients.

Whether log-probs are the engine's to the last bit only a GPU can tell: tests/gpu/test_numerics.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import build_config
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import ConfigError
from rlcore.train.fsdp.on_policy import _norm, _Rotated, engine_log_probs, rotate


@pytest.fixture
def trainers(process_group: None, model_folder: Path) -> Any:
    """By precision: one that computes in bfloat16 as SGLang does, and the usual float32 one."""
    from rlcore.train.fsdp.trainer import FsdpTrainer

    def make(as_sglang: bool, **more: Any) -> Any:
        precision = "bfloat16" if as_sglang else "float32"
        config = TrainConfig(**{"lr": 1e-2, "num_iterations": 4, "precision": precision} | more)
        made = FsdpTrainer(
            config, AlgorithmConfig(), temperature=0.7, seed=0, device="cpu", as_sglang=as_sglang
        )
        made.load(model_folder, "start")
        return made

    return make


def test_log_probs_and_gradients_are_those_of_the_model(toy: Any, trainers: Any) -> None:
    batch = toy.shares(toy.random_sequences(7), 1, micro_batches=2)[0]
    ours, usual = trainers(as_sglang=True), trainers(as_sglang=False)
    sequences = [[5, 9, 2, 7, 30, 11], list(range(2, 30))]
    for got, right in zip(ours.log_probs(sequences), usual.log_probs(sequences), strict=True):
        assert got == pytest.approx(right, abs=0.05)
        assert torch.tensor(got).bfloat16().float().tolist() == got, "rounded, as the engine's"
    (_, gradient), (_, right) = (t.measure(batch, AlgorithmConfig()) for t in (ours, usual))
    both = torch.cat(gradient), torch.cat(right)
    assert torch.nn.functional.cosine_similarity(*both, dim=0) > 0.999
    assert both[0].norm() == pytest.approx(both[1].norm().item(), rel=0.02)


def test_checkpointing_changes_nothing(toy: Any, trainers: Any) -> None:
    batch = toy.shares(toy.random_sequences(7), 1)[0]
    reports = [
        trainers(as_sglang=True, gradient_checkpointing=saves).train("start", "next", batch).metrics
        for saves in (False, True)
    ]
    assert reports[0]["loss"] == reports[1]["loss"]
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-6)


def test_the_stream_between_layers_is_float32(trainers: Any) -> None:
    ours, seen = trainers(as_sglang=True), []
    policy = ours._held()[0]
    for layer in policy.lm.base_model.layers:
        layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        layer.self_attn.register_forward_hook(lambda module, args, out: seen.append(out[0].dtype))
    ours.log_probs([[1, 2, 3]])
    assert seen == [torch.bfloat16, torch.float32] * 2


def test_formulas_by_hand() -> None:
    torch.manual_seed(0)
    norm = torch.nn.Linear(8, 1)
    norm.weight = torch.nn.Parameter(torch.randn(8).bfloat16().float())
    norm.variance_epsilon = 1e-6  # type: ignore[assignment]
    x = torch.randn(3, 8).bfloat16()
    quotient = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(_norm(norm, x), norm.weight * quotient.bfloat16().float(), atol=1e-6)
    turned = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(3, 1, 4, dtype=torch.float64)
    torch.autograd.gradcheck(lambda x: _Rotated.apply(x, angles.cos(), angles.sin()), turned)
    back = rotate(rotate(turned, angles.cos(), angles.sin()), angles.cos(), -angles.sin())
    assert torch.allclose(back, turned)
    hidden, weight = torch.randn(5, 16), torch.randn(11, 16)
    targets = torch.tensor([0, 3, 10, 2, 2])
    got, _ = engine_log_probs(hidden, weight, targets, 0.5)
    logits = hidden.bfloat16() @ weight.bfloat16().t()
    right = (logits / 0.5).log_softmax(-1).gather(-1, targets[:, None])[:, 0].float()
    assert torch.equal(got, right)


def test_another_model_is_refused(toy: Any, process_group: None, tmp_path: Path) -> None:
    from rlcore.train.fsdp.trainer import FsdpTrainer

    folder = toy.write_model(tmp_path / "llama", "llama")
    made = FsdpTrainer(
        TrainConfig(precision="bfloat16"),
        AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device="cpu",
        as_sglang=True,
    )
    with pytest.raises(ConfigError, match=r"knows models of type qwen3, not 'llama'"):
        made.load(folder, "start")


def test_settings_of_engines_go_with_those_of_the_trainer() -> None:
    from rlcore.cluster.plan import _engine_numerics

    tree: dict[str, Any] = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
        "rollout": {"engine": "sglang"},
        "algorithm": {"true_on_policy_mode": True},
        "train": {"precision": "bfloat16"},
    }
    assert _engine_numerics(build_config(tree)) == {
        "enable_deterministic_inference": True,
        "rl_on_policy_target": "fsdp",
        "attention_backend": "fa3",
    }
    with pytest.raises(ConfigError, match=r"cannot with train.precision = 'float32'; set"):
        build_config(tree | {"train": {}})
    alone = {"algorithm": {}, "train": {"deterministic": True}}
    assert _engine_numerics(build_config(tree | alone)) == {"enable_deterministic_inference": True}
