"""AdamW over the local shards of FSDP2 parameters, and the gradient norm.

AdamW works on each element alone, so it runs on plain local tensors. The norm is that of the whole
gradient over all ranks.

Invariants:
- Moments exist from the start, so that a fresh state saves and loads like any other.
- With `train.optimizer_cpu_offload` the step runs on the CPU, on copies of parameters and gradients
  that lie there beside the moments; the numbers are those of a step on the CPU.
- A step is a function of parameters, gradients, moments and the step count: nothing else is
  remembered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlcore.config.tree import TrainConfig
from rlcore.train.adamw import MOMENTS, make_adamw


class ShardedAdamW:
    """One rank's share of AdamW."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], config: TrainConfig) -> None:
        """`parameters` are FSDP2's, by name; no weight decay for vectors (norms, biases)."""
        self._parameters = {name: cast(DTensor, p) for name, p in parameters}
        # Detached, the local tensor shares the parameter's storage and is a leaf.
        self._held = {
            name: cast(DTensor, p.detach()).to_local() for name, p in self._parameters.items()
        }
        self._mesh = next(iter(self._parameters.values())).device_mesh
        self._local = self._held
        if config.optimizer_cpu_offload:
            self._mesh = init_device_mesh("cpu", (self._mesh.size(),))
            self._local = {name: held.to("cpu", copy=True) for name, held in self._held.items()}
        decayed = [self._local[n] for n, p in self._parameters.items() if p.ndim > 1]
        others = [self._local[n] for n, p in self._parameters.items() if p.ndim <= 1]
        self._adamw = make_adamw(decayed, others, config)
        self.reset()

    def reset(self) -> None:
        """Forget all moments."""
        for local in self._local.values():
            moments = {name: torch.zeros_like(local) for name in MOMENTS}
            self._adamw.state[local] = moments
        self._moments = dict(self._as_shards())
        self.set_steps(0)

    def set_steps(self, steps: int) -> None:
        """Say how many steps the moments stand for."""
        self.steps = steps
        for local in self._local.values():
            self._adamw.state[local]["step"] = torch.tensor(float(steps), device=local.device)

    def take_parameters(self) -> None:
        """Begin with the parameters as they are now; needed when something else has changed
        them.
        """
        for name, held in self._held.items():
            if self._local is not self._held:
                self._local[name].copy_(held)

    # Without a graph a local tensor is at hand; with one it is made.
    @torch.no_grad()
    def collect_gradients(self) -> float:
        """Take over the parameters' gradients; returns the global norm of all of them, before
        clipping.
        """
        grads = []
        for name, parameter in self._parameters.items():
            grad = cast(DTensor, parameter.grad).to_local()
            self._local[name].grad = grad.to(self._local[name].device)
            parameter.grad = None
            grads.append(grad)
        square = nn.utils.get_total_norm(grads).double().square()
        dist.all_reduce(square)
        return math.sqrt(square.item())

    def step(self, lr: float, scale: float) -> None:
        """Multiply the gradients by `scale` and apply them."""
        if scale != 1.0:
            torch._foreach_mul_([cast(Tensor, local.grad) for local in self._local.values()], scale)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        if self._local is not self._held:
            torch._foreach_copy_(list(self._held.values()), list(self._local.values()))
        self.steps += 1
        self.drop_gradients()

    def gradients(self) -> Iterator[Tensor]:
        """What `collect_gradients` took over, this rank's share."""
        for local in self._local.values():
            yield cast(Tensor, local.grad)

    def drop_gradients(self) -> None:
        """Free the gradients, applied or not."""
        for name, parameter in self._parameters.items():
            self._local[name].grad = None
            parameter.grad = None

    def moments(self) -> Iterator[tuple[str, DTensor]]:
        """Each moment, named `moment.parameter`: a DTensor laid out like its parameter, that shares
        the optimizer's storage.
        """
        yield from self._moments.items()

    def _as_shards(self) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self._parameters.items():
            for moment in MOMENTS:
                local = self._adamw.state[self._local[name]][moment]
                yield (
                    f"{moment}.{name}",
                    DTensor.from_local(
                        local,
                        self._mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    ),
                )
