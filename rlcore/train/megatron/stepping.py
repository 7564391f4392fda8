"""Steps of AdamW on what a rank updates: where masters and moments lie, or in the host's memory.

In the host's memory (`train.optimizer_cpu_offload`) pieces are stepped in runs: while one is
computed, the gradients of the next come and the weights of the last go, through pinned memory. So
only two runs of gradients and weights are there besides masters and moments.

Invariant: each element is stepped as it would be alone; runs change no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rlcore.config.tree import TrainConfig
from rlcore.train.adamw import MOMENTS, make_adamw

RUN = 1 << 24
"""Elements that are stepped at once in the host's memory, at most one weight more."""


class Stepped(Protocol):
    """What a rank updates of one weight; all flat, and of the same elements."""

    master: Tensor
    """float32"""
    reduced: Tensor
    """float32: its gradient, on the model's device."""

    @property
    def decays(self) -> bool:
        """Whether weight decay is for it."""

    @property
    def computes(self) -> Tensor:
        """Of the weight that computes, on the model's device."""


class Run:
    """Pieces that are stepped at once."""

    def __init__(self, pieces: Sequence[Stepped], train: TrainConfig) -> None:
        self.pieces = pieces
        decayed = [piece.master for piece in pieces if piece.decays]
        self._adamw = make_adamw(decayed, [p.master for p in pieces if not p.decays], train)
        for piece in pieces:
            moments = {name: torch.zeros_like(piece.master) for name in MOMENTS}
            self._adamw.state[piece.master] = moments
        self.set_steps(0)

    def set_steps(self, steps: int) -> None:
        """Say how many steps the moments stand for."""
        for piece in self.pieces:
            device = piece.master.device
            self._adamw.state[piece.master]["step"] = torch.tensor(float(steps), device=device)

    def moment(self, name: str, piece: Stepped) -> Tensor:
        """One of `MOMENTS`."""
        held: Tensor = self._adamw.state[piece.master][name]
        return held

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Masters and moments follow the pieces' gradients, which lie where they do."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            piece.master.grad = gradient
        self._adamw.step()
        for piece in self.pieces:
            piece.master.grad = None


class Steps:
    """AdamW where masters lie on the model's device."""

    def __init__(self, pieces: Sequence[Stepped], train: TrainConfig) -> None:
        self.runs = [Run(pieces, train)] if pieces else []

    def step(self, lr: float) -> None:
        """Masters, moments and weights follow the gradients."""
        for run in self.runs:
            run.step([piece.reduced for piece in run.pieces], lr)
        self.hand_over()

    def hand_over(self) -> None:
        """Weights become their masters, rounded."""
        for run in self.runs:
            places = [piece.computes for piece in run.pieces]
            torch._foreach_copy_(places, [piece.master for piece in run.pieces])


@dataclass
class _Slot:
    """Pinned memory for the gradients and the weights of a run."""

    gradients: Tensor
    weights: Tensor
    came: torch.cuda.Event | None = None
    went: torch.cuda.Event | None = None


@dataclass
class HostSteps:
    """AdamW where masters lie in the host's memory, and the model maybe on a GPU."""

    pieces: Sequence[Stepped]
    train: TrainConfig
    runs: list[Run] = field(init=False)

    def __post_init__(self) -> None:
        cut = list(_cut(self.pieces))
        self.runs = [Run(pieces, self.train) for pieces in cut]
        size = max((sum(len(p.master) for p in pieces) for pieces in cut), default=0)
        place = self.pieces[0].computes if self.pieces else torch.empty(0)
        self._side = torch.cuda.Stream(place.device) if place.is_cuda else None
        self._slots = [
            _Slot(
                torch.empty(size, dtype=torch.float32, pin_memory=place.is_cuda),
                torch.empty(size, dtype=place.dtype, pin_memory=place.is_cuda),
            )
            for _ in range(min(2, len(cut)))
        ]

    def step(self, lr: float) -> None:
        """Masters, moments and weights follow the gradients."""
        self._follow()
        for number, run in enumerate(self.runs):
            if number == 0:
                self._bring(0)
            if number + 1 < len(self.runs):
                self._bring(number + 1)
            run.step(self._came(number), lr)
            self._send(number)
        self._behind()

    def hand_over(self) -> None:
        """Weights become their masters, rounded."""
        self._follow()
        for number in range(len(self.runs)):
            self._send(number)
        self._behind()

    def _follow(self) -> None:
        """What is copied comes behind what has been computed."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))

    def _bring(self, number: int) -> None:
        slot = self._slots[number % 2]
        with torch.cuda.stream(self._side):
            for place, piece in self._places(number, slot.gradients):
                place.copy_(piece.reduced, non_blocking=True)
            slot.came = self._mark()

    def _came(self, number: int) -> list[Tensor]:
        slot = self._slots[number % 2]
        if slot.came is not None:
            slot.came.synchronize()
        return [place for place, _ in self._places(number, slot.gradients)]

    def _send(self, number: int) -> None:
        slot = self._slots[number % 2]
        if slot.went is not None:
            slot.went.synchronize()
        with torch.cuda.stream(self._side):
            for place, piece in self._places(number, slot.weights):
                place.copy_(piece.master)
                piece.computes.copy_(place, non_blocking=True)
            slot.went = self._mark()

    def _places(self, number: int, memory: Tensor) -> Iterator[tuple[Tensor, Stepped]]:
        pieces = self.runs[number].pieces
        lengths = [len(piece.master) for piece in pieces]
        return zip(memory[: sum(lengths)].split(lengths), pieces, strict=True)

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._side is None else self._side.record_event()

    def _behind(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


def _cut(pieces: Sequence[Stepped]) -> Iterator[list[Stepped]]:
    run: list[Stepped] = []
    for piece in pieces:
        run.append(piece)
        if sum(len(p.master) for p in run) >= RUN:
            yield run
            run = []
    if run:
        yield run
