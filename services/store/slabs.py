"""The slabs of an agent: one for each deployment namespace, made when the first engine attaches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, ValuesView
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from services.store.census import Census
from services.store.directory import Directory
from services.store.lower import Lower, NothingLower
from services.store.memory import stride_of
from services.store.preemption import Victim
from services.store.settings import StoreSettings
from services.store.slab import Slab, boottime, segment_name
from services.store.tenants import Quotas
from services.store.transfer.base import Generations, TransferEngine
from shared.blocks import ITEMSIZE, Namespace
from shared.errors import ConfigError, Contended, InvalidInput, MooncakeError
from shared.records import SlabRecord
from shared.telemetry import log

logger = log("store.slabs")

UNREGISTER_TIMEOUT = 2.0

MOST_BYTES = 1 << 40
"""Of a block whose layout is opaque."""
MOST = 1024
"""Namespaces that have memory at one time. Each is in the agent's record (some 300 bytes, ``LONGEST`` at worst in each
of five texts), which goes to Redis with every heartbeat and is read by everybody."""
LONGEST = 256
"""Bytes of a text in a namespace: fingerprints and names of layouts have up to 64."""

COUNTED = (
    *("slots", "free", "cached", "evictions", "leased_bytes", "store_slots", "store_holds", "store_prefetched"),
    *("store_pinned", "store_leases", "store_landings", "store_quarantined", "store_waiting"),
)
"""What a slab counts (``Slab.amounts``)."""


class Slabs(Mapping[str, Slab]):
    """By segment name. ``pool_bytes`` is shared by all; ``slab_bytes`` bounds each. ``lower`` gives what lies below
    a new one; ``quotas``: of tenants in all of them together."""

    def __init__(
        self,
        settings: StoreSettings,
        directory: Directory,
        threads: ThreadPoolExecutor,
        lower: Callable[[Slab], Lower] = lambda slab: NothingLower(),
        quotas: Quotas | None = None,
    ) -> None:
        self._settings = settings
        self._lower = lower
        self._directory = directory
        self._threads = threads
        self._slabs: dict[str, Slab] = {}
        self._awake: dict[str, Slab] = {}  # where something happened since a look found nothing going on
        self._taken = 0  # bytes of the pool that slabs have
        self._census = Census(COUNTED)
        self._records: dict[str, SlabRecord] = {}
        self._leaving: set[str] = set()  # their memory is in use, but nothing new may use it
        self._attaching = asyncio.Lock()
        self._engine: TransferEngine | None = None
        self._location = ""
        self.quotas = quotas or Quotas()
        self._abort: Callable[[Slab, Victim], None] = lambda slab, victim: None
        self._in_use: Callable[[Slab], bool] = lambda slab: False

    def bind(self, engine: TransferEngine, location: str = "cpu:0") -> None:
        """Slabs made from now on are registered there, as memory at ``location``."""
        self._engine, self._location = engine, location

    def serve(self, abort: Callable[[Slab, Victim], None], in_use: Callable[[Slab], bool]) -> None:
        """Before the first slab is made. ``abort`` is called for a request that has to give way; ``in_use`` says
        whether somebody is attached to a slab."""
        self._abort, self._in_use = abort, in_use

    def __getitem__(self, name: str) -> Slab:
        return self._slabs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._slabs))

    def __len__(self) -> int:
        return len(self._slabs)

    def values(self) -> ValuesView[Slab]:
        """Those of this moment: other threads look while namespaces come and go."""
        return dict(self._slabs).values()

    async def attach(self, namespace: Namespace) -> Slab:
        """The namespace's slab, made now if it is the first time. Where the pool has no room for another one, those
        that nobody has used for long make way. Raises InvalidInput, and ConfigError naming the limit."""
        check(namespace)
        name = segment_name(namespace)
        async with self._attaching:
            if name in self._leaving and not await self._retire(self._slabs[name]):
                raise Contended(f"namespace {name} is making way, and still being read: ask again", field="namespace")
            if name not in self._slabs:
                await self._make_room(stride_of(namespace.geometry))
                self._enter(self._make(namespace.deployment()))
            slab = self._awake[name] = self._slabs[name]
            slab.used_at = boottime()
            return slab

    def _enter(self, slab: Slab) -> None:
        self._slabs[slab.name] = slab
        self._taken += slab.memory.size
        slab.wakes = partial(self._awake.__setitem__, slab.name, slab)

    # -- looking -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Have each slab see what is over, and note which are in use now: somebody is attached, or something of them
        is held. There may be thousands: those at which nothing goes on rest until something happens there."""
        for slab in self._looked_at():
            slab.look()
            if not slab.idle or self._in_use(slab):
                slab.used_at = boottime()
            elif slab.rests:
                self._count(slab)
                del self._awake[slab.name]

    def _looked_at(self) -> list[Slab]:
        """Who is over its quota for a block in one slab has others' to give, in any."""
        if self.quotas.over:
            self._awake.update(self._slabs)
        return [slab for name, slab in self._awake.items() if self._slabs.get(name) is slab]

    def _count(self, slab: Slab) -> None:
        self._census.count(slab.name, slab.amounts())
        self._records[slab.name] = slab.record()

    def totals(self) -> dict[str, float]:
        """What all slabs hold together, see :meth:`Slab.amounts`."""
        for slab in self._looked_at():
            self._count(slab)
        return dict(self._census.totals)

    def records(self) -> list[SlabRecord]:
        """As of the last ``totals``."""
        return list(self._records.values())

    async def _make_room(self, stride: int) -> None:
        """Namespaces come and go: let the memory of the least recently used go until a slab fits."""
        wanted = max(stride, self._settings.slab_bytes)
        if self._fits(wanted):
            return
        self.look()
        for slab in sorted(self._slabs.values(), key=lambda slab: slab.used_at):
            if self._fits(wanted):
                return
            used = self._in_use(slab) or not slab.idle
            if not used and boottime() - slab.used_at >= self._settings.namespace_idle:
                await self._retire(slab)

    async def _retire(self, slab: Slab) -> bool:
        """Its blocks leave the pool; what is on the SSD stays there. False where a peer still reads it: then nothing
        new is read any more, and it goes the next time."""
        slab.empty()
        try:
            if self._engine is not None:
                await self._engine.unregister_local_memory(slab.name, UNREGISTER_TIMEOUT)
        except MooncakeError as e:
            logger.warning("namespace keeps its memory: it is still being read", segment=slab.name, error=e.message)
            self._leaving.add(slab.name)
            return False
        self._leaving.discard(slab.name)
        self._leave(slab)
        slab.lower.end()
        slab.close()
        logger.info("namespace has made way", segment=slab.name, bytes=slab.memory.size)
        return True

    def _leave(self, slab: Slab) -> None:
        del self._slabs[slab.name]
        self._awake.pop(slab.name, None)
        self._taken -= slab.memory.size
        if self._records.pop(slab.name, None) is not None:
            self._census.forget(slab.name)

    def _fits(self, wanted: int) -> bool:
        """One more namespace, with so many bytes."""
        return self._left >= wanted and len(self._slabs) < MOST

    @property
    def _left(self) -> int:
        """Bytes of the pool that no slab has."""
        return self._settings.pool_bytes - self._taken

    def _make(self, namespace: Namespace) -> Slab:
        settings, stride, left = self._settings, stride_of(namespace.geometry), self._left
        if len(self._slabs) >= MOST:
            raise ConfigError(
                f"this agent has {len(self._slabs)} namespaces, {MOST} at most, and all of them are in use (what "
                f"nobody has used for namespace_idle = {settings.namespace_idle:g} s makes way)",
                field="namespace",
            )
        slots = min(max(settings.slab_bytes, stride) if settings.slab_bytes else left, left) // stride
        if slots < 1:
            raise ConfigError(
                f"no room for another namespace: a slot takes {stride} bytes, {left} are left of pool_bytes = "
                f"{settings.pool_bytes} (slab_bytes = {settings.slab_bytes}: 0 gives all to the first namespace; what "
                f"nobody has used for namespace_idle = {settings.namespace_idle:g} s makes way)",
                field="slab_bytes" if left < settings.pool_bytes else "pool_bytes",
            )
        try:
            slab = Slab(namespace, slots, settings, self._directory, self._threads, self.quotas)
        except OSError as e:
            raise ConfigError(
                f"the system does not give the memory of a namespace, {slots * stride} bytes: {e.strerror}",
                field="pool_bytes",
            ) from e
        slab.room.abort = partial(self._abort, slab)
        try:
            if self._engine is not None:
                register(self._engine, slab, self._location)
        except BaseException:
            slab.close()
            raise
        slab.lower = self._lower(slab)
        return slab

    async def close(self) -> None:
        """After the last engine is gone, before the transfer engine closes: its transfers end first."""
        for slab in self._slabs.values():
            try:
                if self._engine is not None:
                    await self._engine.unregister_local_memory(slab.name, UNREGISTER_TIMEOUT)
            except MooncakeError:
                continue  # still in use: the mapping goes with the process
            slab.close()
        for slab in tuple(self._slabs.values()):
            self._leave(slab)


def register(engine: TransferEngine, slab: Slab, location: str) -> None:
    memory = slab.memory
    generations = Generations(memory.words_fd, memory.stride)
    engine.register_local_memory(memory.view, location, name=slab.name, fd=memory.fd, generations=generations)


def check(namespace: Namespace) -> None:
    """Raises InvalidInput for a namespace that describes no block."""
    for name in ("model", "weights", "tokenizer", "dtype", "layout"):
        if (length := len(getattr(namespace, name).encode(errors="replace"))) > LONGEST:
            raise InvalidInput(f"namespace: {name} has {length} bytes, {LONGEST} at most", field=name)
    for name in ("layers", "kv_heads", "head_dim", "block_size"):
        if not 0 < getattr(namespace, name) < 1 << 20:
            raise InvalidInput(f"namespace: {name} = {getattr(namespace, name)}", field=name)
    least = namespace.layers * namespace.block_size  # a byte for each token in each layer
    if namespace.block_bytes and not least <= namespace.block_bytes <= MOST_BYTES:
        raise InvalidInput(
            f"namespace: block_bytes = {namespace.block_bytes} is not 0 or {least} to {MOST_BYTES}", field="block_bytes"
        )
    if namespace.dtype not in ITEMSIZE:
        raise InvalidInput(f"namespace: dtype {namespace.dtype!r} is none of {', '.join(ITEMSIZE)}", field="dtype")
