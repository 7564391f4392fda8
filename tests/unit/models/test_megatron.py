"""megatron-core's models against transformers': the same logits of the same weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_families

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from rlcore.conversion.convert import hf_to_torch_dist, torch_dist_to_hf  # noqa: E402
from rlcore.conversion.sources import HfFolder, Weights  # noqa: E402
from rlcore.models.hf_config import read_hf_config  # noqa: E402
from rlcore.train.megatron import parallel  # noqa: E402
from rlcore.train.megatron.cpu import without_cuda  # noqa: E402
from rlcore.train.megatron.model import Layout, build_model  # noqa: E402
from rlcore.train.megatron.weights import load_weights, named_weights  # noqa: E402
from rlcore.train.ranks import one_rank  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    with one_rank("cpu"):
        parallel.set_up(Layout())
        yield


@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_logits_are_those_of_transformers_and_weights_come_back(
    family: str, tmp_path: Path
) -> None:
    reference = tiny_families.build(family, tmp_path)
    arch = read_hf_config(tmp_path)
    weights = Weights(arch, HfFolder(tmp_path))
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40).expand(2, -1)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 40, 80], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 40, 80], dtype=torch.int32),
        max_seqlen_q=40,
        max_seqlen_kv=40,
    )
    with torch.no_grad(), without_cuda():
        model = build_model(arch, Layout()).eval()
        load_weights(model, arch, weights.read)
        expected = reference(ids).logits
        got = model(ids, positions, None)
        assert (got - expected).abs().max() < 1e-4
        assert expected.abs().max() > 0.5
        flat = model(ids.view(1, -1), positions.reshape(1, -1), None, packed_seq_params=packed)
        assert (flat.view_as(expected) - expected).abs().max() < 1e-4
        for name, tensor in named_weights(model, arch):
            assert torch.equal(tensor, weights.read(name)), name


@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_megatron_reads_the_checkpoints_that_conversion_writes(family: str, tmp_path: Path) -> None:
    tiny_families.build(family, tmp_path / "model", "bfloat16")
    arch = read_hf_config(tmp_path / "model")
    hf_to_torch_dist(tmp_path / "model", tmp_path / "dist", padded_vocab_size=128)
    weights = Weights(arch, HfFolder(tmp_path / "model"))
    with torch.no_grad(), without_cuda():
        model = build_model(arch, Layout(), "bfloat16")
        for parameter in model.parameters():
            parameter.zero_()
        stored = dist_checkpointing.load(
            model.sharded_state_dict(), str(tmp_path / "dist" / "release")
        )
        model.load_state_dict(stored, strict=False)
        for name, tensor in named_weights(model, arch):
            assert torch.equal(tensor, weights.read(name)), name


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_conversion_reads_the_checkpoints_that_megatron_writes(family: str, tmp_path: Path) -> None:
    tiny_families.build(family, tmp_path / "model")
    arch = read_hf_config(tmp_path / "model")
    weights = Weights(arch, HfFolder(tmp_path / "model"))
    (tmp_path / "dist").mkdir()
    with torch.no_grad(), without_cuda():
        model = build_model(arch, Layout())
        load_weights(model, arch, weights.read)
        dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path / "dist"))
    torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", tmp_path / "model")
    back = HfFolder(tmp_path / "back")
    for name in back.shapes:
        assert torch.equal(back.read(name), weights.read(name)), name
