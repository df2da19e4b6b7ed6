"""Continuous batching in closed form: the ends of the steps until somebody joins or leaves, all at once. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.latency import DecodeModel
from simulator.request import Request

Floats = npt.NDArray[np.float64]

MOST_STEPS = 4096


@dataclass(eq=False, slots=True)
class Sequence:
    """``tokens``: context when it joined; ``steps`` it takes part in, the first of them numbered ``first``."""

    request: Request
    tokens: int
    steps: int
    first: int = 0


class Batch:
    """Sequences that step together. A step takes ``base + per_sequence·batch + per_token·context`` seconds, and
    each adds a token to each context. Who owns it calls, at a step's end, :meth:`leave`, :meth:`join`, :meth:`plan`,
    and :meth:`advance` when steps are over."""

    def __init__(self, model: DecodeModel) -> None:
        self.model = model
        self.context = 0
        self.step = 0
        self._leaving: list[tuple[int, int, Sequence]] = []
        self._ends = np.zeros(1024)
        self._past = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._leaving)

    def join(self, sequence: Sequence) -> None:
        """From the next step on. ``steps`` is at least 1."""
        sequence.first = self.step
        self._number += 1
        heapq.heappush(self._leaving, (self.step + sequence.steps, self._number, sequence))
        self.context += sequence.tokens

    def plan(self, begins: float) -> Floats:
        """Ends of the steps until the first sequence leaves, were nobody to join."""
        count = min(self._leaving[0][0] - self.step, MOST_STEPS)
        batch = len(self._leaving)
        first = self.model.seconds(batch, self.context)
        more = self.model.per_token * batch
        steps = np.arange(1, count + 1, dtype=np.float64)
        ends: Floats = begins + first * steps + more * (steps * (steps - 1) / 2)
        return ends

    def advance(self, ends: Floats) -> None:
        """These steps are over."""
        if self.step - self._past + len(ends) > len(self._ends):
            self._make_room(len(ends))
        at = self.step - self._past
        self._ends[at : at + len(ends)] = ends
        self.step += len(ends)
        self.context += len(ends) * len(self._leaving)

    def leave(self) -> list[Sequence]:
        """Those that have taken all of their steps."""
        gone = []
        while self._leaving and self._leaving[0][0] <= self.step:
            _, _, sequence = heapq.heappop(self._leaving)
            self.context -= sequence.tokens + sequence.steps
            gone.append(sequence)
        return gone

    def drop(self) -> list[Sequence]:
        """All of them, in the order in which they joined."""
        gone = [sequence for _, _, sequence in sorted(self._leaving, key=lambda one: one[1])]
        self._leaving, self.context = [], 0
        return gone

    def ends(self, sequence: Sequence, upto: int | None = None) -> Floats:
        """Ends of the steps that it took so far, or of all up to its last."""
        last = min(sequence.first + sequence.steps, self.step if upto is None else upto)
        return self._ends[sequence.first - self._past : last - self._past]

    def _make_room(self, steps: int) -> None:
        """Ends of steps in which nobody took part who is still here are forgotten."""
        oldest = min((sequence.first for _, _, sequence in self._leaving), default=self.step)
        kept = self._ends[oldest - self._past : self.step - self._past]
        self._ends = np.zeros(max(1024, 2 * (len(kept) + steps)))
        self._ends[: len(kept)] = kept
        self._past = oldest
