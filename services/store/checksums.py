"""Checksums of committed blocks (xxh3), computed on a thread that does not hold the GIL.

A commit is visible at once and does not wait; whoever leases a block to a peer waits for its checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from services.store.memory import SlabMemory
from services.store.pins import Pins
from services.store.slots import Slots
from shared.errors import StaleGeneration


def checksum(data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


class Checksums:
    """Fills in ``Slot.checksum``. A slot is pinned while it is read, so that it is not reused underneath."""

    def __init__(self, memory: SlabMemory, slots: Slots, pins: Pins, threads: ThreadPoolExecutor) -> None:
        self._memory = memory
        self._slots = slots
        self._pins = pins
        self._threads = threads
        self._pending: dict[tuple[int, int], asyncio.Future[int | None]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, slot: int) -> None:
        """The slot was just committed."""
        generation = self._pins.generation(slot)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, self.compute, slot, generation, self._slots[slot].length)
        self._pending[slot, generation] = future
        future.add_done_callback(lambda done: self._done(slot, generation, done))

    def compute(self, slot: int, generation: int, length: int) -> int | None:
        """Any thread. None when the slot has been reused."""
        try:
            with self._pins.pin(slot, generation), self._memory.range(slot, length) as data:
                return checksum(data)
        except StaleGeneration:
            return None

    def _done(self, slot: int, generation: int, done: asyncio.Future[int | None]) -> None:
        del self._pending[slot, generation]
        if not done.cancelled() and done.exception() is None and self._pins.generation(slot) == generation:
            self._slots[slot].checksum = done.result()

    async def ready(self, slots: Iterable[int]) -> None:
        """Wait until these committed slots have their checksums."""
        waiting = [self._pending.get((slot, self._pins.generation(slot))) for slot in slots]
        pending = [future for future in waiting if future is not None]
        if pending:
            await asyncio.wait(pending)
            await asyncio.sleep(0)  # the callbacks that store them run first
