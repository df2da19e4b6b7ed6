"""The block index as conductors see it: which node holds which block, some milliseconds late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.conductor.scheduling import Matches
from simulator.clock import Clock
from simulator.pool import GONE, SSD


class Directory:
    """A bit a node. Changes count ``delay`` seconds after they happen; those due are applied when it is asked."""

    def __init__(self, clock: Clock, nodes: tuple[str, ...], delay: float) -> None:
        self.ids = nodes
        self._clock, self._delay = clock, delay
        self._holders: dict[int, int] = {}
        self._slow: dict[int, int] = {}
        self._coming: list[tuple[float, int, int, int]] = []
        self._applied = 0

    def listener(self, node: str) -> Callable[[int, int], None]:
        """What the node's pool tells its changes to."""
        bit = 1 << self.ids.index(node)

        def changed(block: int, tier: int) -> None:
            self._coming.append((self._clock.now + self._delay, block, bit, tier))

        return changed

    def matches(self, chain: Sequence[int]) -> tuple[Matches, dict[str, int]]:
        """How long a prefix each node holds, and how much of it is in DRAM where some is not."""
        self._catch_up()
        lengths = np.zeros(len(self.ids), dtype=np.int64)
        holders, last = (1 << len(self.ids)) - 1, 0
        fast: dict[str, int] = {}
        for at, block in enumerate(chain):
            still = holders & self._holders.get(block, 0)
            if still != holders:
                if last := holders & ~still:
                    lengths[bits(last)] = at
                holders = still
                if not holders:
                    break
            if self._slow and (slow := self._slow.get(block, 0) & holders):
                for node in bits(slow):
                    fast.setdefault(self.ids[node], at)
        else:
            lengths[bits(holders)] = len(chain)
        return Matches(self.ids, lengths), fast

    def replicas(self, block: int) -> int:
        """On how many nodes it is."""
        self._catch_up()
        return self._holders.get(block, 0).bit_count()

    def _catch_up(self) -> None:
        now, coming, at = self._clock.now, self._coming, self._applied
        while at < len(coming) and coming[at][0] <= now:
            _, block, bit, tier = coming[at]
            self._apply(block, bit, tier)
            at += 1
        if at > 65_536:
            del coming[:at]
            at = 0
        self._applied = at

    def _apply(self, block: int, bit: int, tier: int) -> None:
        _set(self._holders, block, bit, tier != GONE)
        if tier == SSD or self._slow:
            _set(self._slow, block, bit, tier == SSD)


def _set(masks: dict[int, int], block: int, bit: int, on: bool) -> None:
    mask = masks.get(block, 0)
    mask = mask | bit if on else mask & ~bit
    if mask:
        masks[block] = mask
    else:
        masks.pop(block, None)


def bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
