"""The table `megatron` is checked by megatron-core's source, before anything starts."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import tiny_families

from rlcore.config import build_config
from rlcore.errors import ConfigError
from rlcore.preflight import check_megatron
from rlcore.train.megatron.table import MODEL, OTHERS, check_table, fields_of


def test_what_is_read_is_what_there_is() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    assert {field.name for field in fields(MLATransformerConfig)} <= fields_of(MODEL).keys()
    others = {
        f.name for kind in (DistributedDataParallelConfig, OptimizerConfig) for f in fields(kind)
    }
    assert others <= fields_of(OTHERS).keys()


@pytest.mark.parametrize(
    "table",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "ddp_bucket_size": 7},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"},
        {"moe_z_loss_coeff": 0, "moe_grouped_gemm": True, "bias_activation_fusion": True},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ],
)
def test_taken(table: dict[str, Any]) -> None:
    check_table(table)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"tensor_paralel_size": 2}, "do you mean megatron.tensor_model_parallel_size"),
        ({"tensor_model_parallel_size": "two"}, "must be a whole number from 1 on"),
        ({"tensor_model_parallel_size": True}, "must be a whole number from 1 on"),
        ({"recompute_num_layers": 0}, "must be a whole number from 1 on"),
        ({"recompute_granularity": "banana"}, "must be one of full, selective"),
        ({"recompute_modules": "mlp"}, "must be a list"),
        ({"recompute_modules": ["mlp"]}, "needs megatron.recompute_granularity = 'selective'"),
        ({"moe_grouped_gemm": "no"}, "must be true or false"),
        ({"moe_aux_loss_coeff": -1.0}, "must be a number from 0 on"),
        ({"moe_z_loss_coeff": [1.0]}, "must be a number from 0 on"),
        ({"moe_token_dispatcher_type": "foo"}, "must be one of allgather, alltoall, flex"),
        ({"bias_activation_fusion": 1}, "must be true or false"),
        ({"timers": 1}, "a table cannot say it"),
        ({"softmax_scale": 1.0}, "follows from the model"),
        ({"mscale": 1.0}, "follows from the model"),
        ({"moe_expert_capacity_factor": 1.0}, "experts that the policy chose"),
        ({"moe_input_jitter_eps": 0.1}, "experts that the policy chose"),
        ({"fp8": "hybrid"}, "train.precision"),
        ({"cuda_graph_impl": "local"}, "of any length"),
        ({"mtp_num_layers": 1}, "no model here has"),
        ({"optimizer": "sgd"}, "the optimizer is AdamW"),
        ({"virtual_pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size above 1"),
    ],
)
def test_refused(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_table(table)
    assert told in str(caught.value) and str(caught.value).startswith("megatron.")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"megatron": {"tensor_paralel_size": 2}}, "do you mean"),
        ({"megatron": {"tensor_model_parallel_size": 2}}, "1 trainer ranks"),
        ({"megatron": {"expert_model_parallel_size": 2}}, "no multiple of"),
        ({"model": {"lora_rank": 4}}, "model.lora_rank is not there"),
        ({}, None),
    ],
)
def test_a_run_is_looked_at_before_it_starts(
    more: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    tiny_families.build("qwen3", tmp_path)
    tree: dict[str, Any] = {
        "model": {"path": str(tmp_path)},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
        "train": {"backend": "megatron"},
    }
    for name, keys in more.items():
        tree[name] = tree.get(name, {}) | keys
    config = build_config(tree)
    if told is None:
        check_megatron(config)
        return
    with pytest.raises(ConfigError, match=told):
        check_megatron(config)
