"""Virtual time: a heap of what happens when. Equal times happen in the order in which they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

BEFORE = 1 << 62


class Clock:
    """``now`` in seconds. Nothing can be taken back: who may change their mind looks when it comes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = self._firsts = 0

    def first(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """As :meth:`at`, before all that happens at the same time and was asked for with that one."""
        if time < self.now:
            raise ValueError(f"{time} is before now, {self.now}")
        self._firsts += 1
        heapq.heappush(self._heap, (time, self._firsts - BEFORE, call, args))

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """``time``: not before now. Raises ValueError for the past."""
        if time < self.now:
            raise ValueError(f"{time} is before now, {self.now}")
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def ticket(self) -> int:
        """A number larger than all before."""
        self._count += 1
        return self._count

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
