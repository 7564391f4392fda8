"""Weights in fp8 blocks: how far from the numbers, under which names, and what carries them."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from safetensors.torch import load_file

from rlcore.config import build_config
from rlcore.conversion.fp8 import hf_to_fp8
from rlcore.errors import ConfigError, SyncError
from rlcore.weights.fp8 import BlockFp8, dequantise, quantise
from rlcore.weights.group import join_group, open_group
from rlcore.weights.transport import DiskTransport

BLOCK = (128, 128)


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (5, 513)])
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_numbers_come_back_within_the_steps_of_the_format(
    shape: tuple[int, int], powers_of_two: bool
) -> None:
    torch.manual_seed(0)
    # Blocks of very different sizes, and one of zeros.
    weight = torch.randn(shape) * torch.logspace(-6, 3, shape[1])
    weight[:128, :128] *= torch.rand(()) if powers_of_two else 0
    narrow, scales = quantise(weight, BLOCK, powers_of_two=powers_of_two)
    assert narrow.dtype == torch.float8_e4m3fn and narrow.shape == weight.shape
    assert scales.dtype == torch.float32
    assert scales.shape == tuple(-(-size // 128) for size in shape)
    if powers_of_two:
        assert torch.equal(scales.log2(), scales.log2().round())
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    spread = spread[: shape[0], : shape[1]]
    bound = torch.maximum(weight.abs() / 16, spread * 2**-10)
    error = (dequantise(narrow, scales, BLOCK) - weight).abs()
    assert (error <= bound * (1 + 1e-6)).all()
    # The largest number of a block stands for itself.
    assert powers_of_two or error.flatten()[weight.abs().argmax()] <= 1e-6 * weight.abs().max()


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "deepseek_v3"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, and the same in fp8."""
    root = tmp_path_factory.mktemp(request.param)
    tiny_families.build(request.param, root / "plain")
    hf_to_fp8(root / "plain", root / "fp8")
    return root / "plain", root / "fp8"


def test_projections_are_quantised_and_routers_are_not(folders: tuple[Path, Path]) -> None:
    plain, fp8 = (load_file(folder / "model.safetensors") for folder in folders)
    quantised = {name for name, tensor in fp8.items() if tensor.dtype == torch.float8_e4m3fn}
    assert quantised == {n for n in plain if "proj" in n and n.endswith("weight")}
    assert fp8.keys() - plain.keys() == {f"{name}_scale_inv" for name in quantised}
    for name in quantised:
        numbers, scales = quantise(plain[name], BLOCK)
        assert torch.equal(fp8[name].float(), numbers.float())
        assert torch.equal(fp8[f"{name}_scale_inv"], scales)
    for name in plain.keys() - quantised:
        kind = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        assert fp8[name].dtype == kind and torch.equal(fp8[name], plain[name].to(kind))
    kept = json.loads((folders[1] / "config.json").read_text())["quantization_config"]
    assert set(kept["modules_to_not_convert"]) == {"lm_head"} | {
        n.removesuffix(".weight") for n in plain if n.endswith("mlp.gate.weight")
    }


def test_a_folder_of_weights_has_the_names_types_and_config_of_the_engines(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    from rlcore.train.fsdp.model import load_policy
    from rlcore.weights.experts import by_expert

    plain, fp8 = folders
    policy = load_policy(plain)
    named = [*policy.weights(), *policy.fixed()]
    whole = (part for name, p in named for part in by_expert(name, p))
    exact = "e_score_correction_bias"
    tensors = ((n, p.detach() if exact in n else p.detach().bfloat16()) for n, p in whole)
    transport = DiskTransport(tmp_path, fp8, "7", "bfloat16", flush_cache=True)
    transport.prepare(transport.parts(BlockFp8.of_folder(fp8).apply(tensors)))
    found, wanted = (
        {name: (t.dtype, t.shape) for name, t in load_file(folder / "model.safetensors").items()}
        for folder in (transport.folder, fp8)
    )
    assert found == wanted
    assert torch.float8_e4m3fn in {dtype for dtype, _ in found.values()}
    configs = [json.loads((f / "config.json").read_text()) for f in (transport.folder, fp8)]
    assert configs[0] == configs[1] and "quantization_config" in configs[0]


def test_transformers_reads_what_is_written(folders: tuple[Path, Path]) -> None:
    """Names and layout are those of another implementation, which takes the numbers back."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    plain, fp8 = folders
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(ids).logits
        read: Any = AutoModelForCausalLM.from_pretrained(
            fp8, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
        )
        got = read(ids).logits
    assert (got - expected).abs().max() < 0.15 * expected.abs().max()


def test_folders_that_do_not_fit_are_said(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain, fp8 = folders
    with pytest.raises(ConfigError, match="has no quantization_config of quant_method 'fp8'"):
        BlockFp8.of_folder(plain)
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read"):
        BlockFp8.of_folder(tmp_path)
    other = replace(BlockFp8.of_folder(fp8), names=frozenset({"model.layers.9.up_proj.weight"}))
    with pytest.raises(SyncError, match=r"holds model\.layers\.9\.up_proj\.weight in fp8"):
        list(other.apply(iter([("model.norm.weight", torch.ones(3))])))


def test_bytes_of_8_bits_are_broadcast() -> None:
    narrow, scales = quantise(torch.randn(64, 32), BLOCK)
    opening = open_group("127.0.0.1", 2, "fp8", "gloo")
    got = [torch.empty_like(narrow), torch.empty_like(scales)]

    def receive() -> None:
        member = join_group(opening.meeting, 1)
        member.broadcast(got)
        member.close()

    receiver = threading.Thread(target=receive)
    receiver.start()
    sender = opening.join()
    sender.broadcast([narrow, scales])
    receiver.join(60)
    sender.close()
    assert torch.equal(got[0].view(torch.uint8), narrow.view(torch.uint8))
    assert torch.equal(got[1], scales)


@pytest.mark.parametrize(
    ("rollout", "weights", "said"),
    [
        ({}, {}, "for rollout.engine = 'sglang'"),
        ({"engine": "sglang"}, {"transport": "tensor"}, "'tensor' sends no fp8 weights"),
    ],
)
def test_settings_that_cannot_work_together(
    rollout: dict[str, Any], weights: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config(
            {
                "model": {"path": "/model"},
                "data": {"path": "/train.jsonl"},
                "reward": {"custom_rm_path": "mine:reward"},
                "rollout": {"hf_checkpoint": "/model-fp8", **rollout},
                "weights": weights,
                "cluster": {"colocate": True},
            }
        )
