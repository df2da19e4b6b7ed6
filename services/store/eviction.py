"""Order in which idle blocks go: least recently used first, of a chain the leaf first, softly pinned ones last."""

from __future__ import annotations

import heapq
from collections.abc import Callable

COMPACT = 4
"""Rebuild a heap when it has this many times more entries than there are slots."""

Rank = tuple[bool, float, int]
"""(softly pinned, stamp, slot): the least goes first."""


class EvictionOrder:
    """Candidates by rank, in two heaps: idle blocks, and prefetched ones that yield only to stronger classes.

    A slot is pushed whenever it may have become a candidate, and judged only when popped; an entry whose rank is no
    longer the slot's is dropped then.
    """

    def __init__(self, slots: int) -> None:
        self.stamps = [0.0] * slots
        self._kept = bytearray(slots)
        self._heaps: tuple[list[Rank], list[Rank]] = ([], [])
        self._clock = 0.0

    @property
    def clock(self) -> float:
        """Grows with every touch."""
        return self._clock

    def rank(self, slot: int) -> Rank:
        return bool(self._kept[slot]), self.stamps[slot], slot

    def keep(self, slot: int, kept: bool) -> None:
        """Softly pinned from now on, or no longer. Push it again."""
        self._kept[slot] = kept

    def kept(self, slot: int) -> bool:
        return bool(self._kept[slot])

    def touch(self, slot: int) -> None:
        """Most recently used now."""
        self._clock += 1
        self.stamps[slot] = self._clock

    def touch_middle(self, slot: int) -> None:
        """Half way between the oldest candidate and now: a fetched copy must first prove its use."""
        oldest = self._heaps[0][0][1] if self._heaps[0] else self._clock
        self.stamps[slot] = (oldest + self._clock) / 2

    def push(self, slot: int, yielding: bool = False) -> None:
        heap = self._heaps[yielding]
        heapq.heappush(heap, self.rank(slot))
        if len(heap) > COMPACT * len(self.stamps):
            heap[:] = [entry for entry in set(heap) if self.rank(entry[2]) == entry]
            heapq.heapify(heap)

    def pop(self, is_candidate: Callable[[int], bool], yielding: bool = False) -> int | None:
        """The next to go. What is no candidate now is dropped: it is pushed again when it becomes one."""
        heap = self._heaps[yielding]
        while heap:
            entry = heapq.heappop(heap)
            slot = entry[2]
            if self.rank(slot) == entry and is_candidate(slot):
                return slot
        return None
