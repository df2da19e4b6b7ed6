"""Blocks on their way back from the SSD: threads that read and verify them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from services.store.ssd.book import Block
from services.store.ssd.files import Files
from services.store.ssd.jobs import Return, bring, runs
from services.store.ssd.tally import Tally

THREADS = 4

FAULTS = 8
"""Blocks in a row that could not be read, after which it is the disk and not a bad page."""


class Reading:
    """``blocks``: on their way now. ``faults``: that could not be read, in a row."""

    def __init__(self, tally: Tally) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ssd-read")
        self._tally = tally
        self.blocks = 0
        self.faults = 0

    async def read(self, files: Files, wanted: Sequence[Return]) -> dict[Block, str]:
        """Why a block did not come: io or checksum; else an empty string. Not to be cancelled: the disk may still
        write into the slots."""
        parts = runs(wanted, lambda r: r.block, lambda r: r.slab.memory.stride)
        began, loop = time.monotonic(), asyncio.get_running_loop()
        self.blocks += len(wanted)
        reads = [loop.run_in_executor(self._threads, bring, files, part) for part in parts]
        try:
            done = await asyncio.gather(*reads, return_exceptions=True)  # all have ended, whatever one of them found
        finally:
            self.blocks -= len(wanted)
        out: dict[Block, str] = {}
        for part, errors in zip(parts, done, strict=True):
            if isinstance(errors, BaseException):
                raise errors
            out |= {one.block: error for one, error in zip(part, errors, strict=True)}
        self._count(out, time.monotonic() - began)
        return out

    def _count(self, read: dict[Block, str], seconds: float) -> None:
        self._tally.moved_up(sum(block.length for block, error in read.items() if not error), seconds)
        for error in read.values():
            self.faults = self.faults + 1 if error == "io" else 0

    @property
    def hopeless(self) -> bool:
        return self.faults >= FAULTS

    def close(self) -> None:
        self._threads.shutdown(wait=False)
