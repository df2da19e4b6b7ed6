"""Registration of segments on all NICs, in the background: in steps, so that neither loop nor GIL is held for long."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from services.store.transfer.base import Generations
from services.store.transfer.rdma.metrics import REGISTERED
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.reach import Part, Reach, Table
from services.store.transfer.rdma.verbs import LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE
from services.store.transfer.segments import Segment
from services.store.transfer.topology.slices import regions
from services.store.transfer.wire import MIB
from shared.errors import DeadlineExceeded, MooncakeError, NotRegistered
from shared.tasks import end
from shared.telemetry import log

if TYPE_CHECKING:
    from pyverbs.mr import MR

STEP = 64 * MIB
WORD = 8

logger = log("transfer.rdma")


class Registered:
    """Memory regions of one segment with one kind of access, on every NIC; complete when ``task`` is done. ``parts``
    with the keys for peers, ``local`` with those for our own work requests."""

    def __init__(self, segment: Segment, nics: Mapping[str, Nic], access: int) -> None:
        self.segment = segment
        self.bytes = 0
        self.parts: list[Part] = []
        self.local: list[Part] = []
        self._access = access
        self._nics = nics
        self._held: dict[str, list[MR]] = {}
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"register {segment.name}")
        self.task.add_done_callback(self._told)

        self._reach: Reach | None = None

    @property
    def ready(self) -> bool:
        return self._reach is not None

    @property
    def reach(self) -> Reach:
        """For our own work requests; when ``ready``."""
        assert self._reach is not None
        return self._reach

    async def complete(self, timeout: float) -> None:
        """Raises DeadlineExceeded with the progress, NoTransport where the NICs do not take it."""
        done, _ = await asyncio.wait({self.task}, timeout=timeout)
        if not done:
            share = self.bytes / self.segment.size
            raise DeadlineExceeded(f"memory is being registered for RDMA: {share:.0%} of {self.segment.size} bytes")
        if self.task.cancelled():
            raise NotRegistered(f"segment {self.segment.name} is not registered any more", field="segment")
        self.task.result()

    async def _run(self) -> None:
        began, segment = time.monotonic(), self.segment
        limit = min(STEP, *(nic.limits.max_mr_size for nic in self._nics.values()))
        align = segment.generations.slot_bytes if segment.generations else mmap.PAGESIZE
        for offset, length in regions(segment.size, limit, align):
            part = Part(offset, length, segment.address + offset, {})
            mine = Part(offset, length, segment.address + offset, {})
            for name in self._nics:
                self._on(name, part, mine)
                await asyncio.sleep(0)
            self.parts.append(part)
            self.local.append(mine)
            self.bytes += length
            REGISTERED.inc(length)
        self._reach = Reach(segment.name, segment.instance, segment.size, segment.location, self.local)
        seconds = round(time.monotonic() - began, 3)
        logger.info("memory registered", segment=segment.name, bytes=self.bytes, nics=len(self._nics), seconds=seconds)

    def _on(self, name: str, part: Part, mine: Part) -> None:
        """Register a part on a device; on one that is lost it has keys that are good for nothing until ``join``."""
        nic = self._nics[name]
        if nic.lost:
            part.keys[name] = mine.keys[name] = 0
            return
        made = nic.register(part.address, part.length, self._access)
        self._held.setdefault(name, []).append(made)
        part.keys[name], mine.keys[name] = made.rkey, made.lkey

    def leave(self, name: str) -> None:
        """The device is no more."""
        for region in self._held.pop(name, []):
            region.close()

    async def join(self, name: str) -> None:
        """The device is back. Raises NoTransport."""
        for part, mine in list(zip(self.parts, self.local, strict=True)):
            self._on(name, part, mine)
            await asyncio.sleep(0)

    def _told(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("memory cannot be registered", segment=self.segment.name, error=str(error))

    async def close(self) -> None:
        """Nobody reaches the memory by these regions any more when this returns."""
        await end(self.task)
        REGISTERED.dec(self.bytes)
        self.bytes = 0
        held, self._held = self._held, {}
        for region in chain.from_iterable(held.values()):
            region.close()
            await asyncio.sleep(0)


class Words:
    """The generations of a segment's slots, readable for peers."""

    def __init__(self, segment: Segment, table: Generations, nics: Mapping[str, Nic]) -> None:
        self.slots = -(-segment.size // table.slot_bytes)
        self.slot_bytes = table.slot_bytes
        skip = table.offset % mmap.PAGESIZE
        self._size = skip + self.slots * WORD
        self._map = mmap.mmap(table.fd, self._size, offset=table.offset - skip)  # writable: else it cannot be pinned
        self._address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._skip = skip
        self._nics = nics
        self._held: dict[str, MR] = {}
        for name in nics:
            self.join(name)

    def join(self, name: str) -> None:
        if not self._nics[name].lost:
            self._held[name] = self._nics[name].register(self._address, self._size, REMOTE_READ)

    def leave(self, name: str) -> None:
        if name in self._held:
            self._held.pop(name).close()

    def table(self) -> Table:
        keys = {name: self._held[name].rkey if name in self._held else 0 for name in self._nics}
        return Table(self._address + self._skip, self.slots, self.slot_bytes, keys)

    def close(self) -> None:
        for region in self._held.values():
            region.close()


class Regions:
    """All registrations of an agent. Memory that peers may write (``REMOTE_WRITE``) is registered for that apart, when
    the first of them has a landing in it: what takes no landings can never be written from afar."""

    def __init__(self, nics: Mapping[str, Nic], open_guard: bool) -> None:
        self._nics = nics
        self._open_guard = open_guard
        self._read: dict[str, Registered] = {}
        self._written: dict[str, Registered] = {}
        self._words: dict[str, Words] = {}

    def add(self, segment: Segment) -> None:
        self._read[segment.name] = Registered(segment, self._nics, LOCAL_WRITE | REMOTE_READ)

    def own(self, segment: Segment) -> Registered:
        """For our own work requests. Raises NotRegistered."""
        registered = self._read.get(segment.name)
        if registered is None or registered.segment is not segment:
            raise NotRegistered(f"segment {segment.name} is not registered", field="segment")
        return registered

    async def shown(self, name: str, write: bool, timeout: float) -> Reach:
        """What a peer needs to READ or WRITE the segment. Raises NotRegistered, DeadlineExceeded, NoTransport."""
        registered = self._read.get(name)
        if registered is None or registered.segment.closing:
            raise NotRegistered(f"segment {name} is not registered", field="segment")
        segment = registered.segment
        if write:
            if name not in self._written:
                self._written[name] = Registered(segment, self._nics, LOCAL_WRITE | REMOTE_WRITE)
            registered = self._written[name]
        await registered.complete(timeout)
        check, table = self._check(segment)
        return Reach(name, segment.instance, segment.size, segment.location, registered.parts, check, table)

    def _check(self, segment: Segment) -> tuple[str, Table | None]:
        if self._open_guard:
            return "open", None
        if segment.generations is None:
            return "ask", None
        if segment.name not in self._words:
            self._words[segment.name] = Words(segment, segment.generations, self._nics)
        return "table", self._words[segment.name].table()

    async def remove(self, name: str) -> None:
        """Nothing of ours is in flight on it; peers' accesses fail from now on."""
        for registered in (self._read.pop(name, None), self._written.pop(name, None)):
            if registered is not None:
                await registered.close()
        if (words := self._words.pop(name, None)) is not None:
            words.close()

    def leave(self, name: str) -> None:
        """A device is no more: what is registered on it goes, so that it can."""
        for registered in self._all():
            registered.leave(name)

    async def join(self, name: str) -> None:
        """It is back. Raises NoTransport."""
        for registered in list(self._all()):
            if isinstance(registered, Words):
                registered.join(name)
            else:
                await registered.join(name)

    def _all(self) -> Iterator[Registered | Words]:
        return chain(self._read.values(), self._written.values(), self._words.values())

    def progress(self) -> tuple[int, int]:
        """(bytes registered, bytes to register) of memory that peers may read."""
        return sum(r.bytes for r in self._read.values()), sum(r.segment.size for r in self._read.values())

    async def close(self) -> None:
        for name in list(self._read):
            try:
                await self.remove(name)
            except MooncakeError:
                continue
