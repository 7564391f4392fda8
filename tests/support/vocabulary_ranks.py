"""One of two ranks that have half of a vocabulary each: log-probs, entropies and gradients."""

from pathlib import Path

import torch
import torch.distributed as dist

from rlcore.train.megatron.logprobs import parallel_log_probs

ROWS = 23
"""Of the first rank; the second has the rest."""


def run(rank: int, folder: str, temperature: float, chunk: int) -> None:
    """Reads `given.pt`, and writes what this rank came to."""
    torch.set_num_threads(1)
    home = Path(folder)
    store = dist.FileStore(str(home / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    given = torch.load(home / "given.pt")
    hidden = given["hidden"].requires_grad_()
    whole = given["weight"]
    own = (whole[:ROWS] if rank == 0 else whole[ROWS:]).clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    log_probs, entropy = parallel_log_probs(
        hidden, own, given["targets"], temperature, rank * ROWS, group, chunk
    )
    (log_probs * given["of_log_probs"] + entropy * given["of_entropy"]).sum().backward()
    found = (log_probs.detach(), entropy.detach(), hidden.grad, own.grad)
    torch.save(found, home / f"found-{rank}.pt")
    dist.destroy_process_group()
