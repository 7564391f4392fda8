"""Modules of a layer that are computed again, by megatron-core's names."""

from pathlib import Path
from typing import Any

import pytest
import tiny_families

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rlcore.config.tree import AlgorithmConfig, TrainConfig  # noqa: E402
from rlcore.errors import ConfigError  # noqa: E402
from rlcore.train.megatron.trainer import MegatronTrainer  # noqa: E402

SELECTIVE = {"recompute_granularity": "selective"}


def trained(folder: Path, toy: Any, table: dict[str, Any]) -> Any:
    trainer = MegatronTrainer(
        TrainConfig(lr=1e-2, num_iterations=4),
        AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device="cpu",
        megatron=table,
    )
    trainer.load(folder, "start")
    trainer.train("start", "next", toy.shares(toy.random_sequences(8), 1, micro_batches=2)[0])
    return trainer.digest()


def test_modules_computed_again_change_nothing(
    process_group: None, toy: Any, tmp_path: Path
) -> None:
    tiny_families.build("qwen3", tmp_path / "model")
    plain = trained(tmp_path / "model", toy, {})
    for modules in (["core_attn"], ["core_attn", "mlp"]):
        table = SELECTIVE | {"recompute_modules": modules}
        assert trained(tmp_path / "model", toy, table) == plain, modules
    with pytest.raises(ConfigError, match="recompute_modules"):
        trained(tmp_path / "model", toy, SELECTIVE | {"recompute_modules": ["everything"]})


def test_nothing_is_kept_for_backward_where_there_is_none(
    process_group: None, tmp_path: Path
) -> None:
    tiny_families.build("glm4", tmp_path / "model")
    trainer = MegatronTrainer(
        TrainConfig(), AlgorithmConfig(), temperature=1.0, seed=0, device="cpu", megatron={}
    )
    trainer.load(tmp_path / "model", "start")
    graphs: list[bool] = []
    for layer in trainer._policy.chunks[0].decoder.layers:
        layer.register_forward_hook(lambda _, __, out: graphs.append(out[0].requires_grad))
    trainer.log_probs([[1, 2, 3]])
    assert graphs and not any(graphs)
