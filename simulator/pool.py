"""A node's KV pool: blocks in DRAM, what makes way there on SSD, both least recently used first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from simulator.lru import Lru

DRAM, SSD, GONE = 0, 1, 2


class Hold(NamedTuple):
    """Blocks in use, in the pool as it was before the node died, if it did."""

    chain: Sequence[int]
    incarnation: int


class Pool:
    """``changed(blocks, tier)`` hears of changes: DRAM, SSD, or GONE. Blocks in use (:meth:`hold`) stay in DRAM."""

    def __init__(self, dram: float, ssd: float, changed: Callable[[Sequence[int], int], None]) -> None:
        self.dram = Lru(dram)
        self.ssd = Lru(ssd)
        self._held: dict[int, int] = {}
        self._incarnation = 0
        self._changed = changed

    def match(self, chain: Sequence[int]) -> tuple[int, int]:
        """(leading blocks that are here, those of them before the first that is on SSD)."""
        dram, ssd, fast = self.dram, self.ssd, -1
        for at, block in enumerate(chain):
            if block in dram:
                continue
            if block not in ssd:
                return at, at if fast < 0 else fast
            if fast < 0:
                fast = at
        return len(chain), len(chain) if fast < 0 else fast

    def hold(self, chain: Sequence[int]) -> Hold:
        held = self._held
        for block in chain:
            held[block] = held.get(block, 0) + 1
        return Hold(chain, self._incarnation)

    def release(self, hold: Hold) -> None:
        """Once for each hold; one of before the node died is nothing any more."""
        if hold.incarnation != self._incarnation:
            return
        held = self._held
        for block in hold.chain:
            left = held.pop(block) - 1
            if left:
                held[block] = left

    def put(self, chain: Sequence[int], fetched: bool = False) -> None:
        """Now in DRAM and just used, the head of the chain last; a new copy of others' blocks enters in the middle."""
        blocks = reversed(chain)
        new = self.dram.insert_middle(blocks) if fetched else self.dram.touch(blocks)
        if new:
            self.ssd.remove(new)
            self._changed(new, DRAM)
        self._make_room()

    def clear(self) -> None:
        """The node died."""
        self._changed([*self.dram, *self.ssd], GONE)
        self.dram.clear()
        self.ssd.clear()
        self._held.clear()
        self._incarnation += 1

    def _make_room(self) -> None:
        """Where everything is in use, the pool is larger for as long."""
        tries, victims = len(self.dram), list[int]()
        while self.dram.over and tries:
            block = self.dram.victim()
            tries -= 1
            if block in self._held:
                self.dram.touch((block,))
            else:
                victims.append(block)
        if victims:
            self._drop(victims)

    def _drop(self, blocks: Sequence[int]) -> None:
        if not self.ssd.capacity:
            self._changed(blocks, GONE)
            return
        self.ssd.touch(blocks)
        self._changed(blocks, SSD)
        gone = list[int]()
        while self.ssd.over:
            gone.append(self.ssd.victim())
        if gone:
            self._changed(gone, GONE)
