"""The plan's bytes against what a trainer holds, and its arithmetic against known figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_families

from flows.commands.plan import architecture_of, plan, work_of
from rlcore.algorithms.flops import ModelShape
from rlcore.algorithms.flops import forward_flops as flops_of_a_sequence
from rlcore.config import build_config
from rlcore.config.load import with_values
from rlcore.errors import ConfigError
from rlcore.models.hf_config import read_hf_config
from rlcore.models.plan import GPUS, Work, activations, forward_flops, memory, trained
from rlcore.models.plan import plan as count
from rlcore.models.presets import read_preset
from rlcore.models.tensors import size_of

H200 = GPUS["h200"]
ALONE = Work(
    ranks=1,
    ranks_per_node=8,
    tokens_per_micro_batch=256,
    tokens_per_step=256,
    steps=1,
    sequence=256,
    bytes_of_numbers=4,
    recomputes=False,
)
WIDER = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_activations_are_what_backward_keeps(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_families.FAMILIES, family, WIDER)
    tiny_families.build(family, tmp_path)
    arch = read_hf_config(tmp_path)
    plain = kept(tmp_path, recomputes=False)
    assert plain == pytest.approx(activations(arch, ALONE), rel=0.15)
    # Backward makes one layer's again while it has the inputs of all.
    peak = kept(tmp_path, recomputes=True) + plain / arch.num_hidden_layers
    assert peak == pytest.approx(activations(arch, replace(ALONE, recomputes=True)), rel=0.2)


def kept(folder: Path, recomputes: bool) -> int:
    """Bytes that autograd holds after a forward pass, parameters aside."""
    import torch

    from rlcore.train.fsdp.attention import SequenceLayout
    from rlcore.train.fsdp.model import load_policy

    policy = load_policy(folder, checkpointing=recomputes)
    parameters = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    held: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(256) % 96
    layout = SequenceLayout.of((256,), torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        scored = policy(ids, torch.arange(256), layout, torch.arange(256), ids, 1.0)
    assert scored[0].requires_grad
    return sum(storage.nbytes() for storage in held.values())


def test_the_optimizer_s_bytes_are_those_that_it_holds(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from rlcore.config.tree import TrainConfig
    from rlcore.train.fsdp.model import load_policy, shard
    from rlcore.train.fsdp.optimizer import ShardedAdamW
    from rlcore.train.ranks import one_rank

    tiny_families.build("qwen3", tmp_path)
    planned = memory(read_hf_config(tmp_path), ALONE, H200)
    with one_rank("cpu"):
        policy = load_policy(tmp_path)
        mesh = init_device_mesh("cpu", (1,))
        shard(policy, policy.lm.base_model.layers, mesh, "float32")
        optimizer = ShardedAdamW(list(policy.weights()), TrainConfig())
        held = sum(t.numel() * t.element_size() for _, t in policy.weights())
        moments = sum(m.numel() * m.element_size() for _, m in optimizer.moments())
    assert (held, moments) == (planned["master weights"], planned["optimizer"])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("targets", [(), ("q_proj", "o_proj")])
def test_adapters_are_those_that_a_trainer_makes(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    from rlcore.train.fsdp.lora import Adapters
    from rlcore.train.fsdp.model import load_policy
    from rlcore.train.trainer import Lora

    tiny_families.build(family, tmp_path)
    arch, policy = read_hf_config(tmp_path), load_policy(tmp_path)
    Adapters(policy, Lora(rank=2, alpha=4, targets=targets), 0)
    made = sum(p.numel() for _, p in policy.trained())
    work = replace(ALONE, lora_rank=2, lora_targets=targets)
    assert trained(arch, work) == made
    planned, whole = memory(arch, work, H200), memory(arch, ALONE, H200)
    assert planned["optimizer"] == 8 * made and planned["gradients"] == 4 * made
    assert planned["master weights"] == whole["master weights"] + 4 * made


def test_a_reference_without_adapters_takes_time_and_no_memory() -> None:
    arch = read_preset("qwen3-4B").architecture
    work = replace(ALONE, ranks=8, lora_rank=8, frozen=1, shared=1)
    found, plain = count(arch, work, H200), count(arch, ALONE, H200)
    assert (
        found.memory["frozen models"]
        == 0
        < memory(arch, replace(work, shared=0), H200)["frozen models"]
    )
    # Forward and the gradients of what layers are given; the reference's forward.
    assert found.compute_s * 8 == pytest.approx(plain.compute_s)
    full = count(arch, replace(work, lora_rank=None), H200)
    assert sum(found.traffic.values()) < sum(full.traffic.values())


def test_moments_in_the_cpu_s_memory_are_not_on_the_gpu() -> None:
    arch = read_preset("qwen3-4B").architecture
    saved = memory(arch, ALONE, H200)["optimizer"]
    assert saved == 8 * size_of(arch).parameters
    assert memory(arch, replace(ALONE, offloads=True), H200)["optimizer"] == 0


def test_operations_are_those_that_balancing_counts() -> None:
    arch = read_preset("qwen3-4B").architecture
    names = ModelShape.__dataclass_fields__
    shape = ModelShape(**{name: getattr(arch, name) for name in names})
    counted = flops_of_a_sequence(4096, shape) / 4096
    assert forward_flops(arch, 4096) == pytest.approx(counted, rel=0.001)


def test_a_known_model_on_known_gpus() -> None:
    arch = read_preset("qwen3-30B-A3B").architecture
    work = replace(
        ALONE, ranks=8, tokens_per_micro_batch=8192, tokens_per_step=2**20, bytes_of_numbers=2
    )
    found = count(arch, work, H200)
    own = size_of(arch).parameters / 8
    assert found.memory["optimizer"] == own * 8 and found.memory["master weights"] == own * 4
    more = count(arch, replace(work, ranks=64), H200)
    assert more.memory["optimizer"] * 8 == found.memory["optimizer"]
    assert more.compute_s * 8 == pytest.approx(found.compute_s)
    # Beyond a node the network is what counts.
    assert more.traffic_s > found.traffic_s / 8
    recomputed = count(arch, replace(work, recomputes=True), H200)
    assert recomputed.memory["activations"] < found.memory["activations"] / 10
    assert recomputed.compute_s == pytest.approx(found.compute_s * 4 / 3)


def run_of(**model: str) -> Any:
    return build_config(
        {
            "model": model,
            "data": {"path": "/train.jsonl"},
            "reward": {"custom_rm_path": "mine:reward"},
            "rollout": {"engine": "sglang", "max_response_len": 8192},
            "train": {"precision": "bfloat16", "gradient_checkpointing": True},
            "cluster": {"actor_num_gpus_per_node": 8, "colocate": True},
            "sglang": {"mem_fraction_static": 0.5},
        }
    )


def test_a_run_is_planned_from_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    small = run_of(path="/not/here", preset="qwen3-4B")
    work = work_of(small)
    assert (work.ranks, work.sequence, work.engine_share) == (8, 8192, 0.0)
    stay = with_values(small, {"cluster.offload_rollout": False})
    assert work_of(stay).engine_share == 0.5
    assert (work.tokens_per_micro_batch, work.bytes_of_numbers) == (8192, 2)
    assert plan(small, "h200", as_json=False) == 0
    assert "4.02 billion parameters, 8 x h200" in capsys.readouterr().out
    large = run_of(path="/not/here", preset="qwen3-235B-A22B")
    assert plan(large, "h200", as_json=False) == 1
    assert "does not fit: 64 ranks" in " ".join(capsys.readouterr().out.split())


def test_what_a_run_saves_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    large = run_of(path="/not/here", preset="qwen3-235B-A22B")
    lora = with_values(large, {"model.lora_rank": 16, "algorithm.use_kl_loss": True})
    work = work_of(lora)
    assert (work.lora_rank, work.frozen, work.shared) == (16, 1, 1)
    offloads = with_values(large, {"train.optimizer_cpu_offload": True})
    assert work_of(offloads).offloads
    plan(large, "h200", as_json=False)
    assert "train.optimizer_cpu_offload = true" in " ".join(capsys.readouterr().out.split())
    plan(offloads, "h200", as_json=False)
    assert "optimizer_cpu_offload" not in capsys.readouterr().out


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(ConfigError, match=r"name its architecture by model\.preset"):
        architecture_of(run_of(path="/not/here"))
    with pytest.raises(ConfigError, match="--gpu abacus: there are a100"):
        plan(run_of(path="/not/here", preset="qwen3-4B"), "abacus", as_json=False)
