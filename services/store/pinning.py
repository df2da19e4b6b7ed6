"""Pins: blocks that are kept here for an owner, until a time. Pure: ``now`` is seconds of CLOCK_BOOTTIME, passed in.

A hard pin keeps a block, and the blocks before it in its chain that are here, from every eviction. A soft pin lets
all others go first. A pin belongs to a name, not to a connection: it ends by ``unpin`` of the same name, at its time,
or when the block leaves the pool (by ``remove``, or, softly pinned, under pressure).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from services.store.pool import Pool
from shared.errors import PinLimit

MAX_OWNERS = 16
"""Names that pin one block at a time."""


@dataclass(slots=True)
class Pin:
    """``slot`` is the block's. ``until`` may be infinite."""

    slot: int
    hard: bool
    until: float


class Cover:
    """Slots that hard pins keep: each by pins of its own and by pinned blocks that follow it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._counts: dict[int, int] = {}
        self._parents: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def missing(self, slot: int) -> int:
        """Slots that a pin of this one would keep in addition."""
        return len(self._way(slot))

    def _way(self, slot: int) -> list[int]:
        """From the slot up, as far as nothing is kept yet."""
        way: list[int] = []
        at: int | None = slot
        while at is not None and at not in self._counts:
            way.append(at)
            at = self._above(at)
        return way

    def _above(self, slot: int) -> int | None:
        return self._pool.find(self._pool.slots[slot].parent)

    def add(self, slot: int) -> None:
        way = self._way(slot)
        for at in way:
            self._counts[at] = 0
            self._pool.use(at)
        for at in way:
            above = self._above(at)
            if above is not None:
                self._parents[at] = above
                self._counts[above] += 1
        self._counts[slot] += 1

    def remove(self, slot: int) -> None:
        at: int | None = slot
        while at is not None:
            self._counts[at] -= 1
            if self._counts[at]:
                return
            del self._counts[at]
            self._pool.unuse(at)
            at = self._parents.pop(at, None)


class PinTable:
    """All pins of one pool. ``limit``: slots that hard pins may keep."""

    def __init__(self, pool: Pool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._cover = Cover(pool)
        self._pins: dict[bytes, dict[str, Pin]] = {}
        self._ends: list[tuple[float, bytes, str]] = []

    def __len__(self) -> int:
        """Pins, by key and owner."""
        return sum(map(len, self._pins.values()))

    @property
    def kept(self) -> int:
        """Slots that hard pins keep."""
        return len(self._cover)

    def is_hard(self, key: bytes) -> bool:
        return any(pin.hard for pin in self._pins.get(key, {}).values())

    def pin(self, now: float, key: bytes, owner: str, hard: bool, ttl: float) -> bool:
        """False where the block is not here. Again: from now on of this kind, until this time. Raises PinLimit, and
        leaves an earlier pin as it was."""
        slot = self._pool.find(key)
        if slot is None:
            return False
        pins = self._pins.get(key, {})
        old = pins.get(owner)
        if old is None and len(pins) >= MAX_OWNERS:
            raise PinLimit(f"{len(pins)} owners pin this block already", field="keys")
        if hard and not (old is not None and old.hard):
            self._check_room(slot)
            self._cover.add(slot)
        if old is not None and old.hard and not hard:
            self._cover.remove(slot)
        until = now + ttl
        self._pins.setdefault(key, {})[owner] = Pin(slot, hard, until)
        heapq.heappush(self._ends, (until, key, owner))
        self._show(key, slot)
        return True

    def _check_room(self, slot: int) -> None:
        wanted = self._cover.missing(slot)
        if self.kept + wanted > self._limit:
            raise PinLimit(
                f"{wanted} more slots would be pinned: {self.kept} of at most {self._limit} are (pin_share)",
                field="keys",
            )

    def _show(self, key: bytes, slot: int) -> None:
        self._pool.slots.keep(slot, any(not pin.hard for pin in self._pins.get(key, {}).values()))

    def unpin(self, key: bytes, owner: str) -> bool:
        """False where this owner had not pinned it."""
        pins = self._pins.get(key, {})
        pin = pins.pop(owner, None)
        if pin is None:
            return False
        if not pins:
            del self._pins[key]
        if pin.hard:
            self._cover.remove(pin.slot)
        self._show(key, pin.slot)
        return True

    def expire(self, now: float) -> int:
        """End what is over; how many pins that were."""
        over = 0
        while self._ends and self._ends[0][0] <= now:
            until, key, owner = heapq.heappop(self._ends)
            pin = self._pins.get(key, {}).get(owner)
            if pin is not None and pin.until == until:
                over += self.unpin(key, owner)
        if len(self._ends) > 4 * len(self) + 64:
            self._ends = [(pin.until, key, owner) for key, pins in self._pins.items() for owner, pin in pins.items()]
            heapq.heapify(self._ends)
        return over

    def gone(self, keys: Iterable[bytes]) -> None:
        """These have left the pool, and may be back in another slot already: their pins are over."""
        for key in keys:
            for pin in self._pins.pop(key, {}).values():
                if pin.hard:
                    self._cover.remove(pin.slot)
