"""One of two ranks in a process of its own: `python megatron_rank.py RANK FOLDER CASE...`.

A case is a folder below FOLDER with `model`, `dist` and `expected.pt`, named after a family and a
layout. What goes wrong with it is written to `error-RANK` there; then nothing more is tried, since
the other rank may wait.
"""

import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from rlcore.conversion.sources import HfFolder, Weights
from rlcore.models.hf_config import read_hf_config
from rlcore.train.megatron.cpu import without_cuda
from rlcore.train.megatron.model import Layout, build_model
from rlcore.train.megatron.weights import load_weights, named_weights

RANKS = 2
LAYOUTS = {
    "tensor": Layout(tensor_parallel=2),
    "pipeline": Layout(pipeline_parallel=2),
    "expert": Layout(expert_parallel=2),
}


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


def counted(model: Any) -> int:
    """Numbers that this rank holds, biases of routers among them."""
    biases = [b for name, b in model.named_buffers() if name.endswith("expert_bias")]
    return sum(tensor.numel() for tensor in (*model.parameters(), *biases))


def check(folder: Path, layout: Layout, rank: int) -> None:
    """Logits, weights, and a checkpoint at another layout."""
    arch = read_hf_config(folder / "model")
    ids, expected = torch.load(folder / "expected.pt")
    weights = Weights(arch, HfFolder(folder / "model"))
    model = build_model(arch, layout).eval()
    load_weights(model, arch, weights.read)
    (folder / f"parameters-{rank}").write_text(str(counted(model)))
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
    stored = dist_checkpointing.load(model.sharded_state_dict(), str(folder / "dist" / "release"))
    model.load_state_dict(stored, strict=False)
    for name, tensor in model.state_dict().items():
        assert not torch.is_tensor(tensor) or torch.equal(tensor, state[name]), name


def main(rank: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    for case in cases:
        layout = LAYOUTS[case.rpartition("-")[2]]
        parallel_state.initialize_model_parallel(
            layout.tensor_parallel,
            layout.pipeline_parallel,
            expert_model_parallel_size=layout.expert_parallel,
        )
        try:
            with torch.no_grad(), without_cuda():
                check(folder / case, layout, rank)
        except Exception:
            (folder / case / f"error-{rank}").write_text(traceback.format_exc())
            raise
        (folder / case / f"done-{rank}").touch()
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
