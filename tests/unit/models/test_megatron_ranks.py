"""Two ranks hold one model: each its part, together transformers' logits, and all weights again."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_families

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402

from rlcore.conversion.convert import hf_to_torch_dist  # noqa: E402
from rlcore.conversion.sources import HfFolder, Weights  # noqa: E402
from rlcore.models.hf_config import read_hf_config  # noqa: E402
from rlcore.train.megatron.cpu import without_cuda  # noqa: E402
from rlcore.train.megatron.model import Layout, build_model  # noqa: E402
from rlcore.train.megatron.weights import load_weights, named_weights  # noqa: E402

RANKS = 2
TENSOR, PIPELINE = Layout(tensor_parallel=2), Layout(pipeline_parallel=2)
EXPERT = Layout(expert_parallel=2)
CASES = [
    ("qwen3", TENSOR),
    ("glm4", TENSOR),
    ("deepseek_v3", TENSOR),
    ("qwen3", PIPELINE),
    ("glm4_moe", PIPELINE),
    ("qwen3_moe", EXPERT),
]


def on_two_ranks(folder: Path, layout: Layout, work: Callable[[int], None]) -> None:
    """Run `work` in two forked processes that know each other."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store = dist.FileStore(str(folder / "store"), RANKS)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
                parallel_state.initialize_model_parallel(
                    layout.tensor_parallel,
                    layout.pipeline_parallel,
                    expert_model_parallel_size=layout.expert_parallel,
                )
                with torch.no_grad(), without_cuda():
                    work(rank)
                code = 0
            except BaseException:
                (folder / f"error-{rank}").write_text(traceback.format_exc())
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error-*")))
    assert codes == [0, 0], errors


def forward(model: Any, ids: Any, layout: Layout, rank: int) -> Any:
    """Logits; None on a rank that has none."""
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    if layout.pipeline_parallel == 1:
        return model(ids, positions, None)
    if rank == 0:
        dist.send(model(ids, positions, None).contiguous(), 1)
        return None
    hidden = torch.empty(ids.shape[1], ids.shape[0], 64)
    dist.recv(hidden, 0)
    model.set_input_tensor(hidden)
    return model(None, positions, None)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_two_ranks_are_one_model(family: str, layout: Layout, tmp_path: Path) -> None:
    reference = tiny_families.build(family, tmp_path / "model")
    arch = read_hf_config(tmp_path / "model")
    hf_to_torch_dist(tmp_path / "model", tmp_path / "dist")
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids).logits

    def work(rank: int) -> None:
        weights = Weights(arch, HfFolder(tmp_path / "model"))
        model = build_model(arch, layout).eval()
        load_weights(model, arch, weights.read)
        logits = forward(model, ids, layout, rank)
        if logits is not None:
            width = logits.shape[-1]
            own = rank * width if layout.tensor_parallel == RANKS else 0
            assert (logits - expected[..., own : own + width]).abs().max() < 1e-4
        for name, tensor in named_weights(model, arch):
            assert torch.equal(tensor, weights.read(name)), name
        state = {k: v.clone() for k, v in model.state_dict().items() if torch.is_tensor(v)}
        for parameter in model.parameters():
            parameter.zero_()
        stored = dist_checkpointing.load(
            model.sharded_state_dict(), str(tmp_path / "dist" / "release")
        )
        model.load_state_dict(stored, strict=False)
        for name, tensor in model.state_dict().items():
            assert not torch.is_tensor(tensor) or torch.equal(tensor, state[name]), name

    on_two_ranks(tmp_path, layout, work)
