"""A vocabulary in parts on two ranks: the numbers of the whole one."""

from pathlib import Path

import torch
import torch.multiprocessing as mp
from vocabulary_ranks import run

from rlcore.algorithms.logprobs import chunked_log_probs


def test_parts_of_the_vocabulary_make_the_whole_s_numbers(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(11, 8, generator=draw, dtype=torch.float64)
    weight = torch.randn(45, 8, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 45, (11,), generator=draw)
    of_log_probs, of_entropy = torch.randn(2, 11, generator=draw, dtype=torch.float64)
    # A row that nobody differentiates may hold anything.
    of_log_probs[3] = of_entropy[3] = 0.0
    hidden[3] = torch.nan
    given = {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "of_log_probs": of_log_probs,
        "of_entropy": of_entropy,
    }
    torch.save(given, tmp_path / "given.pt")
    mp.spawn(run, (str(tmp_path), 0.7, 4), nprocs=2)
    found = [torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2)]

    whole, output = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = chunked_log_probs(whole, output, targets, 0.7)
    alive = torch.arange(11) != 3
    (log_probs * of_log_probs + entropy * of_entropy)[alive].sum().backward()
    assert whole.grad is not None and output.grad is not None
    for rank in range(2):
        assert torch.allclose(found[rank][0][alive], log_probs[alive], atol=1e-12)
        assert torch.allclose(found[rank][1][alive], entropy[alive], atol=1e-12)
    # Each rank has its share of the sum.
    assert torch.allclose(found[0][2] + found[1][2], whole.grad, atol=1e-12)
    assert torch.allclose(torch.cat([found[0][3], found[1][3]]), output.grad, atol=1e-12)
