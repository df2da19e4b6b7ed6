"""The SSD tier of an agent: what it has, how it is, and that a disk that fails rests while DRAM goes on alone.

The book is the event loop's; files are touched on threads alone, the log and all writes by a single one.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.store.directory import Directory
from services.store.lower import Lower, NothingLower
from services.store.settings import StoreSettings
from services.store.slab import Slab
from services.store.ssd import metrics
from services.store.ssd.book import Block, Book, Name
from services.store.ssd.files import Files, Found
from services.store.ssd.jobs import Return
from services.store.ssd.journal import Entry, Op
from services.store.ssd.reading import Reading
from services.store.ssd.rest import Rest
from services.store.ssd.space import Space
from services.store.ssd.tally import Tally
from services.store.ssd.trouble import reason
from services.store.ssd.writing import Writing
from services.store.tenants import Quotas
from shared.records import SsdRecord
from shared.tasks import end
from shared.telemetry import log

logger = log("store.ssd")

SEGMENTS = 32
"""Segments of a full tier: between namespaces one of them goes at a time."""

MOST_REMOVED = 1 << 16
"""Removals that a tier which is off remembers. What comes back beyond them has the bytes that belong to its key."""

MOST_ORDERED = 1 << 17
"""Blocks whose order of use is kept beyond the end of the agent: a second of work."""

CLOSING = 5.0
"""Seconds for what is in flight when the agent ends."""


class SsdTier:
    """One for an agent. ``state`` is one of ``metrics.STATES``. ``quotas``: what tenants may have of it."""

    def __init__(self, settings: StoreSettings, directory: Directory, quotas: Quotas) -> None:
        self._settings = settings
        self._quotas = quotas
        self._directory = directory
        self._files: Files | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssd-write")
        self.spaces: dict[bytes, Space] = {}
        self._announcing: set[asyncio.Task[None]] = set()
        self.closing = False
        self._removed: set[Name] = set()  # while the tier was off
        self._rest, self._growth = Rest(), Rest()
        self.tally = Tally()
        self._reading = Reading(self.tally)
        self.book = Book(0, 0, quotas)
        self._writing = Writing(self, self._thread)
        self.state = "unused"

    @property
    def used(self) -> bool:
        """Configured, whatever the disk says to it."""
        return bool(self._settings.ssd_path and self._settings.ssd_bytes)

    @property
    def on(self) -> bool:
        return self.state in ("on", "full")

    @property
    def writes(self) -> int:
        """Blocks on their way to the disk."""
        return self._writing.blocks

    @property
    def busy(self) -> bool:
        """Blocks, or what the log is to be told, are on their way: nothing more begins until they are there."""
        return self._writing.working is not None

    @property
    def reads(self) -> int:
        """Blocks on their way back."""
        return self._reading.blocks

    def record(self) -> SsdRecord | None:
        """What the mesh is told; None where there is no such tier."""
        if not self.used:
            return None
        tally = self.tally
        return SsdRecord(
            state=self.state,
            blocks=len(self.book),
            bytes=self.book.size,
            capacity=self._settings.ssd_bytes,
            written=tally.written,
            read=tally.read,
            skipped=tally.skipped,
            lost=tally.lost,
            read_rate=tally.read_rate.value,
            write_rate=tally.write_rate.value,
        )

    # -- coming and going --------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the folder and what is in it. Where that fails the tier rests, and says why."""
        metrics.show_state(self.state)
        if self.used:
            await self._open()

    async def _open(self) -> None:
        path, size = self._settings.ssd_path, self._settings.ssd_bytes
        old, self._files = self._files, None
        try:
            loop, quotas = asyncio.get_running_loop(), self._quotas.unused()
            files, found, book = await loop.run_in_executor(self._thread, begin, old, path, size, quotas)
        except OSError as e:
            self.off(e)
            return
        self._files, self.book, self._reading.faults = files, book, 0
        self._become("on")
        self.tally.lose("log", found.live.bad)
        self.tally.lose("missing", found.missing)
        metrics.DIRECT.set(files.direct)
        found_here = {"blocks": len(book), "bad_entries": found.live.bad, "missing": found.missing}
        logger.info("SSD tier is on", path=path, direct=files.direct, **found_here)
        if not files.direct:
            logger.warning("the file system takes no O_DIRECT: blocks go through the page cache, several times slower")
        self._forget_removed()
        for tenant in tuple(book.owners.quotas.over):  # it may have less than it had under the last agent
            self.make_room(tenant)
        for space in self.spaces.values():
            self._announce(space)

    def _forget_removed(self) -> None:
        for namespace, key in self._removed:
            entry = self.book.drop(namespace, key)
            if entry is not None:
                self._writing.pending.append(entry)
        self._removed.clear()

    def removed(self, namespace: bytes, key: bytes) -> None:
        """Not to be found again, also where the tier is off now and comes back with it."""
        entry = self.book.drop(namespace, key)
        if entry is not None:
            self._writing.pending.append(entry)
        elif self.used and not self.on and len(self._removed) < MOST_REMOVED:
            self._removed.add((namespace, key))

    def make_room(self, tenant: int, size: int = 0) -> bool:
        """A tenant's own least recently used blocks make way until it has ``size`` bytes within its quota. False: it
        never will, or not now."""
        owners = self.book.owners
        if size > owners.quotas.limit(tenant) > 0:
            return False
        while owners.quotas.excess(tenant, size):
            oldest = owners.oldest(tenant)
            if oldest is None:
                return False
            self.removed(*oldest.name)
            self.made_way([oldest.name])
        return True

    def below(self, slab: Slab) -> Lower:
        """What lies below a slab that was just made. The index is told what is here of it."""
        if not self.used:
            return NothingLower()
        if slab.memory.stride > self._settings.ssd_bytes:
            logger.warning("SSD tier has no room for a block", slot_bytes=slab.memory.stride)
        space = self.spaces[slab.namespace.root()] = Space(self, slab, self._directory, self._settings.ssd_ahead)
        self._announce(space)
        return space

    def _announce(self, space: Space) -> None:
        announcing = asyncio.create_task(space.announce(), name="ssd-announce")
        self._announcing.add(announcing)
        announcing.add_done_callback(self._announcing.discard)

    def _become(self, state: str) -> None:
        self.state = state
        metrics.show_state(state)

    def off(self, error: OSError, unlogged: Sequence[Entry] = ()) -> None:
        """For a while: DRAM goes on alone."""
        lost, self.book = self.book, Book(0, 0, self._quotas.unused())
        entries, self._writing.pending = [*unlogged, *self._writing.pending], []
        self._removed |= {(e.namespace, e.key) for e in entries if e.op is Op.DROP}
        self._become(reason(error))
        self.tally.lose("off", len(lost))
        metrics.RESTS.labels(self.state).inc()
        pause = self._rest.fail(time.monotonic())
        logger.error("SSD tier rests", reason=self.state, error=str(error), path=self._settings.ssd_path, seconds=pause)
        self.made_way(lost.names())

    def made_way(self, names: Iterable[Name]) -> None:
        """These are not on the SSD any more."""
        for namespace, key in names:
            space = self.spaces.get(namespace)
            if space is not None:
                space.lost(key)
            else:  # its slab has made way
                self._directory.evicted([key])

    # -- at work -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Write what will soon be evicted, where nothing is being written. After a rest, try the disk again."""
        metrics.BLOCKS.set(len(self.book))
        metrics.BYTES.set(self.book.size)
        if self.busy or self.closing or not self.used:
            return
        if self.on and self._files is not None:
            self._grow()
            self._writing.start(self._files)
        elif not self.reads and self._rest.over(time.monotonic()):
            self._writing.working = asyncio.create_task(self._again(), name="ssd")

    def _grow(self) -> None:
        """After a while there may be room for more segments."""
        if self.state == "full" and self._growth.over(time.monotonic()):
            self.book.capacity = self._settings.ssd_bytes
            self._become("on")

    async def _again(self) -> None:
        try:
            await self._open()
        finally:
            self._writing.working = None

    def well(self, grown: bool) -> None:
        """The disk took blocks; ``grown``: and another segment."""
        self._rest.well()
        if grown:
            self._growth.well()

    def limited(self, error: OSError) -> None:
        """There is no room for another segment."""
        self.book.limit()
        if not self.book.segments:
            self.off(error)
            return
        pause = self._growth.fail(time.monotonic())
        if self.state == "on":
            self._become("full")
            logger.warning("no room for another segment", error=str(error), bytes=self.book.size, seconds=pause)

    async def read(self, wanted: Sequence[Return]) -> dict[Block, str]:
        """Why a block did not come: io, checksum or off; else an empty string. Not to be cancelled: the disk may still
        write into the slots."""
        files = self._files
        if files is None or not self.on:  # since it was looked up
            return {r.block: "off" for r in wanted}
        out = await self._reading.read(files, wanted)
        if self._reading.hopeless and self.on:
            self.off(OSError(errno.EIO, "block after block cannot be read", self._settings.ssd_path))
        return out

    # -- the end -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """After the last read, before the slabs close. What is in flight is written, and what DRAM alone holds as far
        as ``ssd_flush`` seconds go."""
        self.closing = True
        await end(*self._announcing)
        seconds = self._settings.ssd_flush + CLOSING
        try:
            async with asyncio.timeout(seconds):
                await self._finish()
        except TimeoutError:
            logger.error("the SSD does not answer: what was on its way there is lost", seconds=seconds)
        self._thread.shutdown(wait=False)
        self._reading.close()

    async def _finish(self) -> None:
        if self._writing.working is not None:
            await asyncio.wait({self._writing.working})
        if self._files is None:
            return
        if self.on:
            await self._writing.finish(self._files, self._settings.ssd_flush)
        await asyncio.get_running_loop().run_in_executor(self._thread, leave, self._files, self.book)


def begin(old: Files | None, folder: str, capacity: int, quotas: Quotas) -> tuple[Files, Found, Book]:
    """On the writing thread: a log may be long. ``old`` is closed first. Raises OSError."""
    if old is not None:
        old.close()
    files, found = Files.open(folder, capacity)
    book = Book(capacity, capacity // SEGMENTS, quotas)
    book.load(found.live)
    return files, found, book


def leave(files: Files, book: Book) -> None:
    """On the writing thread, as the last: the log is in order of use, so that the next agent knows what to let go."""
    if 0 < len(book) <= MOST_ORDERED:
        try:
            files.replace_log(book.live())
        except OSError as e:
            logger.warning("the log was not written anew", error=str(e))
    files.close()
