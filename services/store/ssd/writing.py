"""Blocks on their way to the SSD: one job at a time, victims ahead of need, at the end what DRAM alone holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from services.store.metrics import CORRUPT
from services.store.ssd.files import Files
from services.store.ssd.jobs import Job, NoSegment, Write, Written, run
from services.store.ssd.journal import Entry
from services.store.ssd.trouble import reason
from shared.telemetry import log

if TYPE_CHECKING:
    from services.store.ssd.space import Space
    from services.store.ssd.tier import SsdTier

logger = log("store.ssd")

JOB_BYTES = 16 << 20
"""Bytes of blocks in flight to the disk, at most; one block where it has more."""


class Writing:
    """``blocks``: on their way now. ``pending``: for the log, before whatever comes next. ``working``: until nothing
    is due any more, or the tier is off."""

    def __init__(self, tier: SsdTier, thread: ThreadPoolExecutor) -> None:
        self._tier = tier
        self._thread = thread
        self.pending: list[Entry] = []
        self.working: asyncio.Task[None] | None = None
        self.blocks = 0

    def start(self, files: Files) -> None:
        """Write what is due, if anything is. Nothing is being written."""
        job = self._due()
        if job is not None:
            self.working = asyncio.create_task(self._work(files, job), name="ssd")

    def _due(self) -> Job | None:
        job = Job(self.pending)
        for space in self._tier.spaces.values():
            job.writes += space.due(JOB_BYTES - job.bytes, len(self._tier.spaces))
        return self._begun(job)

    def _begun(self, job: Job) -> Job | None:
        if not job.writes and not job.before:
            return None
        self.pending = []
        for w in job.writes:
            job.before += w.placement.before
            self._tier.made_way(w.placement.left)
        self.blocks = len(job.writes)
        return job

    async def _work(self, files: Files, first: Job) -> None:
        job: Job | None = first
        try:
            while job is not None:
                await self._write(files, job)
                job = self._due() if self._tier.on and not self._tier.closing else None
        finally:
            self.blocks, self.working = 0, None

    async def finish(self, files: Files, seconds: float) -> None:
        """Write what DRAM alone holds, the most recently used first, as far as ``seconds`` go, and what is pending."""
        before, deadline = self._tier.tally.written, time.monotonic() + seconds
        for space in self._tier.spaces.values() if seconds else ():
            await self._save(files, space, deadline)
        self.blocks = 0
        if self._tier.on and self.pending:
            await self._write(files, Job(self.pending))
        logger.info("SSD tier ends", written=self._tier.tally.written - before, blocks=len(self._tier.book))

    async def _save(self, files: Files, space: Space, deadline: float) -> None:
        warmest = space.warmest(len(self._tier.spaces))
        space.keep(warmest)
        slots = space.within_quotas(warmest, share=1.0)
        while self._tier.on and time.monotonic() < deadline:
            job = self._begun(Job(self.pending, space.writes(slots, JOB_BYTES)))
            if job is None:
                break
            await self._write(files, job)
        space.keep(warmest)

    async def _write(self, files: Files, job: Job) -> None:
        began, book = time.monotonic(), self._tier.book
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._thread, run, files, job)
        except OSError as e:
            if book is not self._tier.book:
                return  # reads have found out meanwhile
            if isinstance(e, NoSegment) and reason(e) != "io":
                self._limited(job, e)
            else:
                self._tier.off(e, job.removals)
        else:
            if book is self._tier.book:
                self._wrote(done, time.monotonic() - began)

    def _wrote(self, done: Sequence[tuple[Write, Written]], seconds: float) -> None:
        for write, written in done:
            self._settle(write, written)
        sizes = [write.placement.block.length for write, written in done if written.checksum is not None]
        self._tier.tally.wrote(sizes, seconds)
        if sizes:
            self._tier.well(grown=any(write.placement.made for write, _ in done))

    def _settle(self, write: Write, written: Written) -> None:
        tier, placement = self._tier, write.placement
        space = tier.spaces[placement.block.namespace]
        if written.checksum is None:
            tier.book.abandon(placement)
        elif not tier.book.written(placement, written.checksum):
            self.pending.append(tier.book.abandon(placement))
        if written.corrupt:
            CORRUPT.labels("owned").inc()
            logger.warning("corrupt block dropped", key=placement.block.key.hex())
            space.corrupt(write.slot, write.generation, placement.block.key)
        space.settled(placement.block)

    def _limited(self, job: Job, error: NoSegment) -> None:
        """Go on with the segments that there are."""
        book, failed = self._tier.book, {segment.id for segment in job.made}
        for write in job.writes:
            book.abandon(write.placement)
            self._tier.spaces[write.placement.block.namespace].settled(write.placement.block)
        for segment in failed:
            book.discard(segment)
        self.pending[:0] = [e for e in job.before if e.segment not in failed]
        self._tier.limited(error)
