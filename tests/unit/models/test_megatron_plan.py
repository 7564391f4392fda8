"""Layouts of Megatron: what cannot be cut is said, and the arithmetic against figures by hand.

`test_megatron_ranks` has the parameters that two ranks hold.
"""

from dataclasses import replace
from typing import Any

import pytest

from flows.commands.plan import plan
from rlcore.config import build_config
from rlcore.errors import ConfigError
from rlcore.models.megatron_layout import MegatronLayout, check_layout
from rlcore.models.megatron_plan import activations, plan_megatron, stage_shares, traffic
from rlcore.models.plan import GPUS, Work
from rlcore.models.plan import activations as activations_of_fsdp
from rlcore.models.presets import read_preset
from rlcore.models.tensors import size_of

DENSE = read_preset("qwen3-4B").architecture
SPARSE = read_preset("qwen3-30B-A3B").architecture
WORK = Work(
    ranks=8,
    ranks_per_node=8,
    tokens_per_micro_batch=4096,
    tokens_per_step=2**19,
    steps=1,
    sequence=4096,
    bytes_of_numbers=2,
    recomputes=False,
)
H200 = GPUS["h200"]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tensor_model_parallel_size": 3}, "3 does not divide 32 attention heads"),
        ({"tensor_model_parallel_size": 3}, r"8 trainer ranks .* are no multiple of .* = 3"),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size = 0 must be at least 1"),
        ({"pipeline_model_parallel_size": 8}, "8 does not divide 36 layers"),
        ({"context_parallel_size": 16}, "8 trainer ranks"),
        ({"context_parallel_size": 3}, "= 3 must divide the 32 heads of a tensor-parallel rank"),
        (
            {"pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 7},
            "4 does not divide 36 layers beside megatron.num_layers_in_last_pipeline_stage",
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 36},
            "2 does not divide 36 layers beside",
        ),
        ({"expert_model_parallel_size": 2}, "the model has no experts"),
        ({"sequence_parallel": True}, "has no effect without tensor parallel ranks"),
    ],
)
def test_a_dense_model_that_cannot_be_cut_like_that(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layout(DENSE, MegatronLayout(**layout), 8)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"expert_model_parallel_size": 3}, "3 does not divide 128 experts"),
        ({"expert_model_parallel_size": 16}, "8 ranks of a pipeline's stage are no multiple"),
        ({"tensor_model_parallel_size": 2}, r"need megatron\.sequence_parallel = true"),
        ({"expert_tensor_parallel_size": 5}, "5 does not divide 768 columns of an expert"),
    ],
)
def test_experts_that_cannot_be_cut_like_that(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layout(SPARSE, MegatronLayout(**layout), 8)


def test_a_family_that_megatron_lacks() -> None:
    arch = read_preset("qwen3-next-80B-A3B").architecture
    with pytest.raises(ConfigError, match="computes no 'qwen3_next' models"):
        check_layout(arch, MegatronLayout(), 8)


@pytest.mark.parametrize("arch", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_uncut_a_rank_holds_the_model(arch: Any) -> None:
    [share] = stage_shares(arch, MegatronLayout())
    assert share.dense + share.expert == size_of(arch).parameters


def test_stages_may_have_layers_of_their_own() -> None:
    even = MegatronLayout(pipeline_model_parallel_size=4)
    own = replace(even, num_layers_in_first_pipeline_stage=6, num_layers_in_last_pipeline_stage=8)
    check_layout(DENSE, own, 8)
    assert own.layers_of_stages(36) == [6, 11, 11, 8]
    first, second, *_ = stage_shares(DENSE, own)
    assert second.dense / 11 == stage_shares(DENSE, even)[1].dense / 9
    assert first.dense < stage_shares(DENSE, even)[0].dense
    assert activations(DENSE, WORK, own, 1, 1) > activations(DENSE, WORK, even, 1, 1)


def test_stages_and_experts_add_up() -> None:
    cut = MegatronLayout(pipeline_model_parallel_size=4, expert_model_parallel_size=8)
    shares = stage_shares(SPARSE, cut)
    whole = sum(share.dense + 8 * share.expert for share in shares)
    assert whole == size_of(SPARSE).parameters
    [first, *_, last] = shares
    assert first.dense - shares[1].dense == SPARSE.vocab_size * SPARSE.hidden_size
    assert last.dense - first.dense == SPARSE.hidden_size


def test_memory_by_hand() -> None:
    layout = MegatronLayout(tensor_model_parallel_size=2, sequence_parallel=True)
    found = plan_megatron(DENSE, WORK, layout, H200).memory
    [share] = stage_shares(DENSE, layout)
    assert found["weights"] == 2 * share.dense and found["gradients"] == 4 * share.dense
    assert found["optimizer"] == 12 * share.dense / 4
    whole = replace(layout, use_distributed_optimizer=False)
    assert plan_megatron(DENSE, WORK, whole, H200).memory["optimizer"] == 12 * share.dense
    both = plan_megatron(DENSE, replace(WORK, critic=True), layout, H200).memory
    assert both["optimizer"] == 2 * found["optimizer"]


def test_activations_are_those_of_fsdp_where_nothing_is_cut() -> None:
    assert activations(DENSE, WORK, MegatronLayout()) == activations_of_fsdp(DENSE, WORK)
    full = MegatronLayout(recompute_granularity="full")
    again = replace(WORK, recomputes=True)
    assert activations(DENSE, WORK, full) == activations_of_fsdp(DENSE, again)
    halved = MegatronLayout(tensor_model_parallel_size=2, sequence_parallel=True)
    assert activations(DENSE, WORK, halved) == activations_of_fsdp(DENSE, WORK) / 2
    staged = MegatronLayout(pipeline_model_parallel_size=2)
    # The first of two stages has two micro-batches under way.
    assert activations(DENSE, WORK, staged, 2) == activations_of_fsdp(DENSE, WORK)


def test_traffic_by_hand() -> None:
    micro_batches, hidden = 16, 4096 * 2560 * 2
    cut = MegatronLayout(tensor_model_parallel_size=2, context_parallel_size=4)
    [share] = stage_shares(DENSE, cut)
    sent = traffic(DENSE, WORK, cut, share, micro_batches)
    # Two sums a layer, forward and backward; a ring of two sends what it sums once.
    assert sent["tensor"] == micro_batches * 36 * 4 * hidden
    assert sent["context"] == micro_batches * 36 * 2 * 3 * (2 * 8 * 128 / 2) * 4096 * 2
    assert sent["gradients and weights"] == 6 * share.dense * 3 / 4
    assert sent["pipeline"] == sent["expert"] == 0
    experts = MegatronLayout(expert_model_parallel_size=8)
    [share] = stage_shares(SPARSE, experts)
    routed = traffic(SPARSE, WORK, experts, share, micro_batches)["expert"]
    assert routed == micro_batches * 48 * 4 * 8 * (4096 * 2048 * 2) * 7 / 8


def test_a_pipeline_waits_for_its_stages() -> None:
    alone = plan_megatron(DENSE, WORK, MegatronLayout(), H200)
    staged = plan_megatron(DENSE, WORK, MegatronLayout(pipeline_model_parallel_size=2), H200)
    # 2^19 tokens are 32 micro-batches of each of four pipelines.
    assert staged.compute_s == pytest.approx(alone.compute_s * (1 + 1 / 32))
    assert staged.seconds == max(staged.compute_s, staged.traffic_s) + staged.waiting_s


def test_a_run_is_planned_in_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    run = build_config(
        {
            "model": {"path": "/not/here", "preset": "qwen3-30B-A3B"},
            "data": {"path": "/train.jsonl"},
            "reward": {"custom_rm_path": "mine:reward"},
            "rollout": {"engine": "sglang", "max_response_len": 8192},
            "train": {"precision": "bfloat16", "max_tokens_per_gpu": 2048},
            "cluster": {"actor_num_gpus_per_node": 8},
        }
    )
    names = {"expert_model_parallel_size": 8, "recompute_granularity": "full"}
    assert plan(run, "h200", names | {"context_parallel_size": None}, as_json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "8 x h200, 8192 tokens a sequence, Megatron, expert 8" in said
    assert "in GB: expert" in said
    assert plan(run, "h200", {"tensor_model_parallel_size": 1}, as_json=False) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in said and "more tensor, pipeline or expert parallel ranks" in said
    own = run.model_copy(
        update={
            "train": run.train.model_copy(update={"backend": "megatron"}),
            "megatron": {"expert_model_parallel_size": 8, "recompute_granularity": "full"},
        }
    )
    assert plan(own, "h200", as_json=False) == 0
    assert "Megatron, expert 8" in " ".join(capsys.readouterr().out.split())
