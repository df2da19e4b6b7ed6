"""The SSD tier of an agent: victims are written ahead of need; what fails ends the tier, not the agent.

One job of writes is in flight. The book is the event loop's; files are touched on threads alone, the log and all
writes by a single one.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.store.directory import Directory
from services.store.lower import Lower, NothingLower
from services.store.metrics import CORRUPT
from services.store.settings import StoreSettings
from services.store.slab import Slab
from services.store.ssd import metrics
from services.store.ssd.book import Block, Book, Name
from services.store.ssd.files import Files, Found, InUse
from services.store.ssd.jobs import Job, NoSegment, Return, Write, Written, bring, run, runs
from services.store.ssd.journal import Entry
from services.store.ssd.space import Space
from shared.tasks import end
from shared.telemetry import log

logger = log("store.ssd")

SEGMENTS = 32
"""Segments of a full tier: between namespaces one of them goes at a time."""

JOB_BYTES = 16 << 20
"""Bytes of blocks in flight to the disk, at most; one block where it has more."""

READERS = 4
CLOSING = 5.0
"""Seconds for what is in flight when the agent ends."""

UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class SsdTier:
    """One for an agent. ``state`` is one of ``metrics.STATES``."""

    def __init__(self, settings: StoreSettings, directory: Directory) -> None:
        self._settings = settings
        self._directory = directory
        self._files: Files | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ssd-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ssd-read")
        self._spaces: dict[bytes, Space] = {}
        self._pending: list[Entry] = []  # for the log, before whatever comes next
        self._working: asyncio.Task[None] | None = None
        self._announcing: set[asyncio.Task[None]] = set()
        self._closing = False
        self.book = Book(0, 0)
        self.writes = self.reads = 0
        self.state = "unused"

    @property
    def on(self) -> bool:
        return self.state in ("on", "full")

    async def open(self) -> None:
        """Take the folder and what is in it. Where that fails the tier is off, and says why."""
        settings = self._settings
        if not settings.ssd_path or not settings.ssd_bytes:
            metrics.show_state(self.state)
            return
        loop = asyncio.get_running_loop()
        try:
            files, found, book = await loop.run_in_executor(self._writer, begin, settings.ssd_path, settings.ssd_bytes)
        except OSError as e:
            self._off(e)
            return
        self._files, self.book = files, book
        self._become("on")
        metrics.LOST.labels("log").inc(found.live.bad)
        metrics.LOST.labels("missing").inc(found.missing)
        metrics.DIRECT.set(files.direct)
        logger.info(
            "SSD tier is on",
            path=settings.ssd_path,
            blocks=len(self.book),
            bad_entries=found.live.bad,
            missing=found.missing,
            direct=files.direct,
        )
        if not files.direct:
            logger.warning("the file system takes no O_DIRECT: blocks go through the page cache, several times slower")

    def below(self, slab: Slab) -> Lower:
        """What lies below a slab that was just made. The index is told what is here of it."""
        if not self.on:
            return NothingLower()
        if slab.memory.stride > self.book.capacity:
            logger.warning("SSD tier has no room for a block", slot_bytes=slab.memory.stride, bytes=self.book.capacity)
        space = self._spaces[slab.namespace.root()] = Space(self, slab, self._directory, self._settings.ssd_ahead)
        announcing = asyncio.create_task(space.announce(), name="ssd-announce")
        self._announcing.add(announcing)
        announcing.add_done_callback(self._announcing.discard)
        return space

    def _become(self, state: str) -> None:
        self.state = state
        metrics.show_state(state)

    def _off(self, error: OSError) -> None:
        """For good: DRAM goes on alone."""
        lost, self.book = self.book, Book(0, 0)
        self._pending.clear()
        self._become(reason(error))
        metrics.LOST.labels("off").inc(len(lost))
        logger.error("SSD tier is off", reason=self.state, error=str(error), path=self._settings.ssd_path)
        self.made_way(lost.names())

    def made_way(self, names: Iterable[Name]) -> None:
        """These are not on the SSD any more."""
        for namespace, key in names:
            if namespace in self._spaces:
                self._spaces[namespace].lost(key)

    # -- writing -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Write what will soon be evicted, where nothing is being written."""
        metrics.BLOCKS.set(len(self.book))
        metrics.BYTES.set(self.book.size)
        if self.on and self._working is None and not self._closing:
            job = self._next()
            if job is not None:
                self._working = asyncio.create_task(self._work(job), name="ssd")

    def log(self, entry: Entry) -> None:
        """Goes into the log soon."""
        self._pending.append(entry)

    def _next(self) -> Job | None:
        job = Job(self._pending)
        for space in self._spaces.values():
            job.writes += space.due(JOB_BYTES - job.bytes, len(self._spaces))
        if not job.writes and not job.before:
            return None
        self._pending = []
        for w in job.writes:
            job.before += w.placement.before
            self.made_way(w.placement.left)
        self.writes = len(job.writes)
        return job

    async def _work(self, first: Job) -> None:
        job: Job | None = first
        try:
            while job is not None:
                await self._write(job)
                job = self._next() if self.on and not self._closing else None
        finally:
            self.writes, self._working = 0, None

    async def _write(self, job: Job) -> None:
        assert self._files is not None
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._writer, run, self._files, job)
        except NoSegment as e:
            self._limited(job, e)
        except OSError as e:
            if self.on:
                self._off(e)
        else:
            for write, written in done:
                self._settle(write, written)

    def _settle(self, write: Write, written: Written) -> None:
        placement, space = write.placement, self._spaces[write.placement.block.namespace]
        if written.checksum is None:
            self.book.abandon(placement)
        elif self.book.written(placement, written.checksum):
            metrics.WRITTEN.inc()
        else:
            self.log(self.book.abandon(placement))
        if written.corrupt:
            CORRUPT.labels("owned").inc()
            logger.warning("corrupt block dropped", key=placement.block.key.hex())
            space.corrupt(write.slot, write.generation, placement.block.key)
        space.settled(placement.block)

    def _limited(self, job: Job, error: NoSegment) -> None:
        """Go on with the segments that there are."""
        failed = {segment.id for segment in job.made}
        for write in job.writes:
            self.book.abandon(write.placement)
            self._spaces[write.placement.block.namespace].settled(write.placement.block)
        for segment in failed:
            self.book.discard(segment)
        self._pending[:0] = [e for e in job.before if e.segment not in failed]
        self.book.limit()
        if not self.book.segments:
            self._off(error)
        elif self.state == "on":
            self._become("full")
            logger.warning("no room for another segment", error=str(error), bytes=self.book.size)

    # -- reading -----------------------------------------------------------------------------------------------

    async def read(self, wanted: Sequence[Return]) -> dict[Block, str]:
        """Why a block did not come: io or checksum; else an empty string. Not to be cancelled: the disk may still
        write into the slots."""
        files, loop = self._files, asyncio.get_running_loop()
        assert files is not None, "a book without files holds nothing"
        parts = runs(wanted, lambda r: r.block, lambda r: r.slab.memory.stride)
        self.reads += len(wanted)
        reads = [loop.run_in_executor(self._readers, bring, files, part) for part in parts]
        try:
            done = await asyncio.gather(*reads, return_exceptions=True)  # all have ended, whatever one of them found
        finally:
            self.reads -= len(wanted)
        out: dict[Block, str] = {}
        for part, errors in zip(parts, done, strict=True):
            if isinstance(errors, BaseException):
                raise errors
            out |= {one.block: error for one, error in zip(part, errors, strict=True)}
        return out

    # -- the end -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """After the last read, before the slabs close. What is in flight is written."""
        self._closing = True
        await end(*self._announcing)
        try:
            async with asyncio.timeout(CLOSING):
                await self._finish()
        except TimeoutError:
            logger.error("the SSD does not answer: what was on its way there is lost", seconds=CLOSING)
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    async def _finish(self) -> None:
        if self._working is not None:
            await asyncio.wait({self._working})
        if self.on and self._pending:
            await self._write(Job(self._pending))
        if self._files is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._files.close)


def begin(folder: str, capacity: int) -> tuple[Files, Found, Book]:
    """On a thread: a log may be long. Raises OSError."""
    files, found = Files.open(folder, capacity)
    book = Book(capacity, capacity // SEGMENTS)
    book.load(found.live)
    return files, found, book


def reason(error: OSError) -> str:
    """One of ``metrics.STATES``."""
    if isinstance(error, InUse):
        return "in_use"
    if error.errno in UNWRITABLE:
        return "unwritable"
    return "no_space" if error.errno in NO_SPACE else "io"
