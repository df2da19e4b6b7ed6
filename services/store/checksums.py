"""Checksums of committed blocks (xxh3), computed on a thread that does not hold the GIL; those of few bytes at once.

A commit is visible at once and does not wait; whoever leases a block to a peer waits for its checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import xxhash

from services.store.memory import SlabMemory
from services.store.pins import Pins
from services.store.slots import Slots
from shared.errors import StaleGeneration


def checksum(data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


ON_LOOP = 256 << 10
"""So many bytes are checked where they are: that takes some 30 us, to tell a thread and hear of it takes longer."""

Block = tuple[int, int, int]
"""(slot, generation, valid bytes)."""

TOGETHER = 4 << 20
"""Bytes that one job of a thread looks at, about: starting one costs as much as some hundred KiB of checksums."""


class Checksums:
    """Fills in ``Slot.checksum``. A slot is pinned while it is read, so that it is not reused underneath."""

    def __init__(self, memory: SlabMemory, slots: Slots, pins: Pins, threads: ThreadPoolExecutor) -> None:
        self._memory = memory
        self._slots = slots
        self._pins = pins
        self._threads = threads
        self._pending: dict[tuple[int, int], asyncio.Future[list[int | None]]] = {}

    def __len__(self) -> int:
        """Blocks whose checksum is awaited."""
        return len(self._pending)

    def start(self, slots: Iterable[int]) -> None:
        """These were just committed."""
        blocks = [(slot, self._pins.generation(slot), self._slots[slot].length) for slot in slots]
        if sum(length for _, _, length in blocks) <= ON_LOOP:
            for slot, _, length in blocks:
                self._slots[slot].checksum = checksum(self._memory.range(slot, length))
            return
        for job in jobs(blocks):
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._compute_all, job)
            self._pending.update({(slot, generation): future for slot, generation, _ in job})
            future.add_done_callback(partial(self._done, job))

    def _compute_all(self, job: Sequence[Block]) -> list[int | None]:
        return [self.compute(*block) for block in job]

    def compute(self, slot: int, generation: int, length: int) -> int | None:
        """Any thread. None when the slot has been reused."""
        try:
            with self._pins.pin(slot, generation), self._memory.range(slot, length) as data:
                return checksum(data)
        except StaleGeneration:
            return None

    def _done(self, job: Sequence[Block], done: asyncio.Future[list[int | None]]) -> None:
        failed = done.cancelled() or done.exception() is not None
        found = [None] * len(job) if failed else done.result()
        for (slot, generation, _), value in zip(job, found, strict=True):
            del self._pending[slot, generation]
            if value is not None and self._pins.generation(slot) == generation:
                self._slots[slot].checksum = value

    def awaited(self, slots: Iterable[int]) -> set[asyncio.Future[list[int | None]]]:
        """The jobs that compute checksums of these slots now."""
        if not self._pending:
            return set()
        waiting = [self._pending.get((slot, self._pins.generation(slot))) for slot in slots]
        return {future for future in waiting if future is not None}

    async def ready(self, slots: Iterable[int]) -> None:
        """Wait until these committed slots have their checksums."""
        pending = self.awaited(slots)
        if pending:
            await asyncio.wait(pending)
            await asyncio.sleep(0)  # the callbacks that store them run first


def jobs(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Blocks in their order, in pieces of about ``TOGETHER`` bytes."""
    job: list[Block] = []
    size = 0
    for block in blocks:
        job.append(block)
        size += block[2]
        if size >= TOGETHER:
            yield job
            job, size = [], 0
    if job:
        yield job
