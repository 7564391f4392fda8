"""Kernels that give the same bits each time, for `train.deterministic`.

Invariant: to be called before the process touches a GPU, since cuBLAS reads its setting then.
"""

import os


def make_deterministic() -> None:
    """Have torch choose kernels whose sums have an order of their own.

    Where it knows none it warns, and the process goes on: the sums of such a kernel may still have
    one order here, as those over one number.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    # Its backward adds up in any order; FlashAttention's and the plain one's do not.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
