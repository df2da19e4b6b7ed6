"""Order in which idle blocks go: least recently used first, of a chain the leaf first."""

from __future__ import annotations

import heapq
from collections.abc import Callable

COMPACT = 4
"""Rebuild a heap when it has this many times more entries than there are slots."""


class EvictionOrder:
    """Candidates by stamp, in two heaps: idle blocks, and prefetched ones that yield only to stronger classes.

    A slot is pushed whenever it may have become a candidate, and judged only when popped; an entry whose stamp is no
    longer the slot's is dropped then.
    """

    def __init__(self, slots: int) -> None:
        self.stamps = [0.0] * slots
        self._heaps: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
        self._clock = 0.0

    @property
    def clock(self) -> float:
        """Grows with every touch."""
        return self._clock

    def touch(self, slot: int) -> None:
        """Most recently used now."""
        self._clock += 1
        self.stamps[slot] = self._clock

    def touch_middle(self, slot: int) -> None:
        """Half way between the oldest candidate and now: a fetched copy must first prove its use."""
        oldest = self._heaps[0][0][0] if self._heaps[0] else self._clock
        self.stamps[slot] = (oldest + self._clock) / 2

    def push(self, slot: int, yielding: bool = False) -> None:
        heap = self._heaps[yielding]
        heapq.heappush(heap, (self.stamps[slot], slot))
        if len(heap) > COMPACT * len(self.stamps):
            heap[:] = [entry for entry in set(heap) if self.stamps[entry[1]] == entry[0]]
            heapq.heapify(heap)

    def pop(self, is_candidate: Callable[[int], bool], yielding: bool = False) -> int | None:
        """The oldest candidate. What is no candidate now is dropped: it is pushed again when it becomes one."""
        heap = self._heaps[yielding]
        while heap:
            stamp, slot = heapq.heappop(heap)
            if self.stamps[slot] == stamp and is_candidate(slot):
                return slot
        return None
