"""One slab: the pool of a namespace with its memory, its leases and landings, and whoever waits for it.

Lives on the agent's event loop; only :attr:`Slab.pins` and :attr:`Slab.grants` are asked from transport threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from services.store.checksums import Checksums
from services.store.directory import Directory
from services.store.landings import LandingTable
from services.store.leases import LeaseTable
from services.store.lower import Lower, NothingLower
from services.store.memory import SlabMemory
from services.store.metrics import EVICTED
from services.store.pinning import PinTable
from services.store.pins import Pins, WriteGrants
from services.store.pool import Pool
from services.store.prefault import Prefault
from services.store.room import RETRY, Room
from services.store.settings import StoreSettings
from services.store.slots import State
from services.store.tenants import Quotas, tag_of
from shared.blocks import Namespace
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import PoolFull
from shared.records import SlabRecord

AGENT = 0
"""The agent itself, as a connection: fetches in flight and quarantined landings."""

TRIM = 64
"""Blocks that one look evicts ahead of need."""


def boottime() -> float:
    """Seconds that go on while the machine sleeps, and that no clock adjustment moves: what leases count in."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def segment_name(namespace: Namespace) -> str:
    """The same on every agent, so that a writer can name its target's."""
    return "kv." + namespace.deployment().root().hex()


class Slab:
    """``wakes`` is called whenever something happens here: until then nobody looks at a slab that rests."""

    def __init__(
        self,
        namespace: Namespace,
        slots: int,
        settings: StoreSettings,
        directory: Directory,
        threads: ThreadPoolExecutor,
        quotas: Quotas | None = None,
    ) -> None:
        self.namespace = namespace
        self.name = segment_name(namespace)
        self.geometry = namespace.geometry
        self.memory = SlabMemory(self.name, slots, self.geometry)
        self.pins = Pins(slots, self.memory.words)
        self.grants = WriteGrants()
        headroom = int(slots * settings.growth_headroom)
        prefetch = int(slots * settings.prefetch_share)
        self.pool = Pool(slots, self.pins.claim, headroom, prefetch, quotas, self.memory.stride)
        self.pinned = PinTable(self.pool, int(slots * settings.pin_share))
        self.leases = LeaseTable(settings.lease_ttl, settings.outgoing_leases)
        self.landings = LandingTable()
        self.checksums = Checksums(self.memory, self.pool.slots, self.pins, threads)
        self.room = Room(self.pool, AGENT, settings.abort_after, self.drain, self.changed)
        self._trimming = False
        self.lower: Lower = NothingLower()
        self.used_at = boottime()
        self.wakes: Callable[[], None] = lambda: None
        self._prefault = Prefault(self.memory, threads)
        self._checksums_on = settings.checksums
        self._low = int(slots * settings.low_watermark)
        self._high = int(slots * settings.high_watermark)
        self._evictions = 0
        self._directory = directory
        self._waiters: dict[bytes, list[asyncio.Future[None]]] = {}
        self._scheduled: asyncio.Handle | None = None

    # -- room ------------------------------------------------------------------------------------------

    def reserve_now(
        self, keys: Sequence[bytes], connection: int, owner: Owner, pool_class: PoolClass
    ) -> list[Held] | None:
        """None where there is no room, or older ones wait for it. Raises DoesNotFit."""
        want = self.room.want(len(keys) - sum(self.pool.contains(keys)), owner, pool_class)
        held = self.pool.reserve(keys, connection, owner, pool_class, self.room.line.kept_from(want))
        self.drain()
        return held

    async def reserve(
        self, keys: Sequence[bytes], connection: int, owner: Owner, pool_class: PoolClass, timeout: float
    ) -> list[Held]:
        """Raises DoesNotFit, PoolFull, QuotaExceeded."""
        count = len(keys) - sum(self.pool.contains(keys))

        def attempt(keep: int) -> list[Held] | None:
            return self.pool.reserve(keys, connection, owner, pool_class, keep)

        try:
            return await self.room.get(attempt, self.room.want(count, owner, pool_class), timeout)
        except PoolFull:
            if self.pool.slots.tenants.excess(tag_of(owner.tenant), count) and pool_class >= PoolClass.PREFETCH:
                raise self.pool.slots.tenants.refusal(owner.tenant) from None
            raise

    async def allocate(
        self, count: int, connection: int, owner: Owner, pool_class: PoolClass, timeout: float
    ) -> list[Held]:
        """Raises DoesNotFit, PoolFull."""

        def attempt(keep: int) -> list[Held] | None:
            return self.pool.allocate(count, connection, owner, pool_class, keep)

        return await self.room.get(attempt, self.room.want(count, owner, pool_class), timeout)

    def changed(self, delay: float = 0.0) -> None:
        """Something was let go: serve the line soon."""
        self.wakes()
        self._schedule(delay)

    def _schedule(self, delay: float = 0.0) -> None:
        if delay == 0.0 and self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._scheduled is None:
            loop = asyncio.get_running_loop()
            self._scheduled = loop.call_later(delay, self._serve) if delay else loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._scheduled = None
        self.room.serve()
        self._trim()
        self._tell()
        self.lower.changed()
        if len(self.room):
            self.changed(RETRY)

    def _trim(self) -> None:
        """Ahead of need, a bounded number of blocks at a time, and as far as nothing is lost by it. First what tenants
        have beyond their quotas."""
        slots = self.pool.slots
        for tenant in slots.tenants.over:
            if slots.evict_own(tenant, min(slots.tenants.excess(tenant), TRIM)) == TRIM:
                self.changed()
        self._trimming = slots.free < (self._high if self._trimming else self._low)
        if self._trimming:
            ready = self.lower.ready(min(self._high - slots.free, TRIM))
            self._trimming = slots.trim(self._high, self._high, ready) > 0
            if self._trimming and slots.free < self._high:
                self.changed()

    def drain(self) -> None:
        """Tell the index and the waiting what has happened, in order. After every change of the pool."""
        self.wakes()
        self._tell()

    def _tell(self) -> None:
        self._prefault.reached(self.pool.slots.reached)
        if self.pool.slots.evictions != self._evictions:
            self.wakes()
            EVICTED.inc(self.pool.slots.evictions - self._evictions)
            self._evictions = self.pool.slots.evictions
        if self.pool.slots.dropped:
            dropped, self.pool.slots.dropped = self.pool.slots.dropped, []
            self.pinned.gone(dropped)
            gone = self.lower.left(dropped)
            if gone:
                self._directory.evicted(gone)
        if self.pool.settled:
            settled, self.pool.settled = self.pool.settled, []
            for key in settled:
                self._wake(key)

    def _wake(self, key: bytes) -> None:
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    # -- blocks ----------------------------------------------------------------------------------------

    def commit(
        self,
        connection: int,
        holds: Sequence[int],
        parent: bytes,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        fetched_by: str = "",
        chained: bool = True,
        checksums: Sequence[int | None] = (),
        tenants: Sequence[int] = (),
    ) -> list[Held]:
        """As :meth:`Pool.commit`, and the index is told. ``checksums``: of each block where they are known already, as
        they are of what was fetched; else they are computed now, on a thread."""
        before = self.pool.contains(keys)
        out = self.pool.commit(connection, holds, parent, keys, lengths, fetched_by, chained, tenants)
        self.drain()
        new = [held.kind is Kind.PRESENT and not there for held, there in zip(out, before, strict=True)]
        self._publish(parent, keys, new, chained)
        self._summed([held.slot if is_new else None for held, is_new in zip(out, new, strict=True)], checksums)
        self.changed()
        return out

    def _summed(self, slots: Sequence[int | None], checksums: Sequence[int | None]) -> None:
        """Checksums of the slots that are new."""
        unknown: list[int] = []
        for slot, known in zip_longest(slots, checksums):
            if slot is not None:
                self.pool.slots[slot].checksum = known
                if known is None:
                    unknown.append(slot)
        if self._checksums_on:
            self.checksums.start(unknown)

    def _publish(self, parent: bytes, keys: Sequence[bytes], new: Sequence[bool], chained: bool) -> None:
        """Tell the index of each run of new keys."""
        run: list[bytes] = []
        for key, is_new in zip((*keys, b""), (*new, False), strict=True):
            if is_new and chained:
                run.append(key)
                continue
            if is_new:
                self._directory.committed(parent, [key])
            elif run:
                self._directory.committed(parent, run)
            run, parent = [], key if chained else parent

    def release(self, connection: int, holds: Sequence[int]) -> None:
        self.pool.release(connection, holds)
        self.drain()
        self.changed()

    def remove(self, key: bytes) -> bool:
        removed = self.lower.remove(key)
        removed |= self.pool.remove(key)
        self.drain()
        self.changed()
        return removed

    def unpin(self, keys: Sequence[bytes], owner: str) -> list[bool]:
        unpinned = [self.pinned.unpin(key, owner) for key in keys]
        self.changed()
        return unpinned

    async def settled(self, key: bytes, timeout: float) -> bool:
        """Wait until nobody writes the key any more. False at the timeout."""
        if not self.pool.in_progress(key):
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        done, _ = await asyncio.wait({waiter}, timeout=timeout)
        if not done and key in self._waiters:
            self._waiters[key].remove(waiter)
            if not self._waiters[key]:
                del self._waiters[key]
        return bool(done)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Here in DRAM or below it. Neither holds nor touches."""
        return [there or self.lower.holds(key) for key, there in zip(keys, self.pool.contains(keys), strict=True)]

    def is_below(self, key: bytes) -> bool:
        """On the SSD alone, and nobody is bringing or writing it here."""
        return self.pool.find(key) is None and not self.pool.in_progress(key) and self.lower.holds(key)

    def use(self, slots: Sequence[int]) -> None:
        """Hold slots for leases or transfers, whatever becomes of the engine."""
        self.wakes()
        for slot in slots:
            self.pool.use(slot)

    def unuse(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pool.unuse(slot)
        if slots:
            self.changed()

    def is_used(self, slot: int) -> bool:
        """A slot that exists and holds something."""
        return 0 <= slot < self.memory.slots and self.pool.slots[slot].state is not State.FREE

    def record(self) -> SlabRecord:
        """What the mesh is told of it."""
        slots = self.pool.slots
        return SlabRecord(
            segment=self.name,
            namespace=self.namespace.deployment(),
            stride=self.memory.stride,
            slots=len(slots),
            used=slots.used,
            blocks=len(slots.by_key),
        )

    def amounts(self) -> dict[str, float]:
        """What it holds now, by kind, its slots by state, and ``leased_bytes``, which readers may be reading."""
        pool, slots = self.pool, self.pool.slots
        return {
            "store_slots": slots.used,
            "store_holds": len(pool.holds),
            "store_prefetched": pool.prefetched,
            "store_pinned": self.pinned.kept,
            "store_leases": len(self.leases),
            "store_landings": len(self.landings),
            "store_quarantined": self.landings.quarantined,
            "store_waiting": len(self.room),
            "slots": len(slots),
            "free": slots.free,
            "cached": slots.idle + slots.yielding,
            "evictions": slots.evictions,
            "leased_bytes": self.leases.bytes,
        }

    def look(self) -> None:
        """Let go of what remote readers' leases and pins no longer hold, and serve the line."""
        self.unuse(self.leases.expire(boottime()))
        self.pinned.expire(boottime())
        self._schedule()

    @property
    def idle(self) -> bool:
        """Nothing of it is held, leased, pinned, waited for or being read."""
        held = self.pool.slots.used or len(self.leases) or len(self.landings) or len(self.room)
        return not (held or len(self.checksums) or self.pins.busy)

    @property
    def rests(self) -> bool:
        """Idle, and a look would find nothing until something happens again."""
        waits = len(self.pinned) or self._trimming or self.pool.slots.free < self._low
        return self.idle and not waits

    def empty(self) -> None:
        """All blocks leave; those on the SSD stay there."""
        self.pool.slots.evict(self.memory.slots, PoolClass.GROWTH)
        self.drain()

    def close(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
        self.memory.close()
