"""The block index as conductors see it: which node holds which block, some milliseconds late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

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
        self._coming: deque[tuple[float, Sequence[int], int, int]] = deque()

    def listener(self, node: str) -> Callable[[Sequence[int], int], None]:
        """What the node's pool tells its changes to."""
        bit = 1 << self.ids.index(node)

        def changed(blocks: Sequence[int], tier: int) -> None:
            self._coming.append((self._clock.now + self._delay, blocks, bit, tier))

        return changed

    def matches(self, chain: Sequence[int]) -> tuple[Matches, dict[str, int]]:
        """How long a prefix each node holds, and how much of it is in DRAM where some is not."""
        self._catch_up()
        lengths = np.zeros(len(self.ids), dtype=np.int64)
        holders = (1 << len(self.ids)) - 1
        fast: dict[str, int] = {}
        for at, block in enumerate(chain):
            still = holders & self._holders.get(block, 0)
            if still != holders:
                if at:
                    lengths[bits(holders & ~still)] = at
                holders = still
                if not holders:
                    break
            if self._slow and (slow := self._slow.get(block, 0) & holders):
                for node in bits(slow).tolist():
                    fast.setdefault(self.ids[node], at)
        else:
            lengths[bits(holders)] = len(chain)
        return Matches(self.ids, lengths), fast

    def replicas(self, block: int) -> int:
        """On how many nodes it is."""
        self._catch_up()
        return self._holders.get(block, 0).bit_count()

    def _catch_up(self) -> None:
        now, coming = self._clock.now, self._coming
        while coming and coming[0][0] <= now:
            _, blocks, bit, tier = coming.popleft()
            _set(self._holders, blocks, bit, tier != GONE)
            if tier == SSD or self._slow:
                _set(self._slow, blocks, bit, tier == SSD)


def _set(masks: dict[int, int], blocks: Sequence[int], bit: int, on: bool) -> None:
    """The mask of one holder is the same object everywhere: most blocks have one, of hundreds of bits."""
    if on:
        for block in blocks:
            mask = masks.setdefault(block, bit)
            if not mask & bit:
                masks[block] = mask | bit
        return
    for block in blocks:
        mask = masks.pop(block, 0)
        if mask & ~bit:
            masks[block] = mask & ~bit


def bits(mask: int) -> npt.NDArray[np.intp]:
    """Numbers of the bits that are set."""
    raw = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), dtype=np.uint8)
    found: npt.NDArray[np.intp] = np.unpackbits(raw, bitorder="little").nonzero()[0]
    return found
