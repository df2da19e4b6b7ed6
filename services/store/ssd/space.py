"""One slab's part of the SSD tier: which of its blocks are there, which go there next, and bringing them back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from services.store.directory import Directory
from services.store.reader import Outcome, Read, Wanted
from services.store.slab import AGENT, Slab
from services.store.sources import Disk
from services.store.ssd.book import Block, Placement
from services.store.ssd.jobs import Return, Write
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import ChecksumMismatch, DeadlineExceeded, MooncakeError, PoolFull
from shared.index import SSD
from shared.tasks import to_the_end
from shared.telemetry import log

if TYPE_CHECKING:
    from services.store.ssd.tier import SsdTier

logger = log("store.ssd")

MOST_AHEAD = 512
"""Victims that are looked at ahead of need: some 2 ms of the event loop."""

CHUNK = 32
"""Blocks of one request that are read at a time."""

SLICE = 1000
"""Blocks that the index is told of at a time."""

LOOKS = 4
"""Looks while as many slots are taken as are kept ready."""

SSD_TRANSPORT = "ssd"


class Space:
    """A :class:`services.store.lower.Lower`. ``ahead``: share of the slots that are free or written ahead of need."""

    def __init__(self, tier: SsdTier, slab: Slab, directory: Directory, ahead: float) -> None:
        self._tier = tier
        self._slab = slab
        self._directory = directory
        self._name = slab.namespace.root()
        self._share = ahead
        self._ahead = min(MOST_AHEAD, max(1, int(ahead * slab.memory.slots)))
        self._quiet: object = None  # nothing was due in this state of the pool
        self._taken = 0  # slots taken until the last look

    async def announce(self) -> None:
        """Tell the index what an earlier agent left, parents first: they were written last."""
        book = self._tier.book
        blocks = list(book.blocks(self._name))
        while blocks and self._tier.book is book:
            for block in blocks[: -SLICE - 1 : -1]:
                if not block.gone and self._slab.pool.find(block.key) is None:
                    self._directory.committed(block.parent, [block.key], SSD)
            del blocks[-SLICE:]
            await asyncio.sleep(0)

    # -- Lower -------------------------------------------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        return self._tier.book.find(self._name, key) is not None

    def left(self, keys: Sequence[bytes]) -> list[bytes]:
        gone: list[bytes] = []
        book = self._tier.book
        for key in keys:
            block = book.find(self._name, key)
            if block is not None:
                book.touch(self._name, key)
                self._directory.committed(block.parent, [key], SSD)
            elif not book.writing(self._name, key):  # else `settled` will tell
                gone.append(key)
                if self._tier.on:
                    self._tier.tally.skip()
        return gone

    def remove(self, key: bytes) -> bool:
        held = self.holds(key)
        there = held or self._tier.book.writing(self._name, key)
        self._tier.removed(self._name, key)
        if held:
            self.lost(key)
        return there

    def changed(self) -> None:
        """Look again before what was written ahead is used up; not for every slot, since a look costs as much as there
        is ahead."""
        if LOOKS * (self._slots_taken() - self._taken) >= self._ahead:
            self._tier.look()

    def _slots_taken(self) -> int:
        slots = self._slab.pool.slots
        return slots.evictions - slots.free

    def ready(self, most: int) -> int:
        if not self._tier.on:
            return most
        coming = self._slab.pool.slots.coming(most)
        unwritten = (i for i, slot in enumerate(coming) if not self.holds(self._slab.pool.slots[slot].key))
        return next((i for i in unwritten if self._most(coming[i]) != 0), len(coming))

    def sizes(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        found = {key: self._tier.book.find(self._name, key) for key in keys}
        return {key: block.length for key, block in found.items() if block is not None}

    def disk(self) -> Disk:
        return Disk(self._tier.tally.read_rate.value, self._tier.reads * self._slab.memory.stride)

    async def read(self, wanted: Sequence[Wanted], owner: Owner, pool_class: PoolClass, timeout: float) -> Read | None:
        book, deadline = self._tier.book, asyncio.get_running_loop().time() + timeout
        found = [book.find(self._name, w.key) for w in wanted]
        blocks = [block for block in found if block is not None]
        if not blocks:
            return None
        for block in blocks:
            book.pin(block)
        try:
            return await self._read(blocks, owner, pool_class, deadline)
        finally:
            for block in reversed(blocks):
                book.unpin(block)
                book.touch(self._name, block.key)

    def end(self) -> None:
        if self._tier.spaces.get(self._name) is self:
            del self._tier.spaces[self._name]

    # -- what becomes of blocks --------------------------------------------------------------------------------

    def lost(self, key: bytes) -> None:
        """The SSD has no copy any more."""
        if self._slab.pool.find(key) is None:
            self._directory.evicted([key])

    def settled(self, block: Block) -> None:
        """It is written, or was given up; it may have left DRAM meanwhile."""
        if self._slab.pool.find(block.key) is not None:
            return
        if self.holds(block.key):
            self._directory.committed(block.parent, [block.key], SSD)
        else:
            self._directory.evicted([block.key])
            if not block.gone:  # else it was removed
                self._tier.tally.skip()

    def corrupt(self, slot: int, generation: int, key: bytes) -> None:
        """Memory does not have the bytes that were committed."""
        if self._slab.pool.find(key) == slot and self._slab.pins.generation(slot) == generation:
            self._slab.remove(key)

    # -- demotion ----------------------------------------------------------------------------------------------

    def due(self, budget: int, spaces: int) -> list[Write]:
        """Victims to write now, the next to go first, each with its place: at most ``budget`` bytes, or one block."""
        slots = self._slab.pool.slots
        self._taken = self._slots_taken()
        state = (slots.evictions, slots.free, slots.idle, slots.clock, len(self._tier.book))
        if state == self._quiet:
            return []
        if budget <= 0:
            return []
        writes = self.writes(self.within_quotas(self._coming(self._reach(spaces)), share=0.5), budget)
        self._quiet = None if writes else state
        return writes

    def _coming(self, reach: int) -> Iterable[int]:
        """The next victims, of which some ``reach`` are looked at: for room, and of each tenant for its quota."""
        slots = self._slab.pool.slots
        for_room = slots.coming(reach - slots.free)
        own = (slots.coming(min(count, reach), tenant) for tenant, count in slots.tenants.near(self._share))
        return dict.fromkeys(chain(for_room, islice(chain.from_iterable(own), MOST_AHEAD)))

    def writes(self, slots: Iterable[int], budget: int) -> list[Write]:
        """Of ``slots`` in order, those that are not on the SSD: at most ``budget`` bytes, or one block."""
        writes: list[Write] = []
        for slot in slots:
            placement = self._place(slot)
            if placement is not None:
                writes.append(self._write(slot, placement))
                budget -= placement.block.length
                if budget <= 0:
                    break
        return writes

    def within_quotas(self, slots: Iterable[int], share: float) -> Iterator[int]:
        """Of ``slots`` in order, no more of each tenant than ``share`` of its quota has room for, or one: else its
        blocks would push each other out for ever."""
        seen: Counter[int] = Counter()
        for slot in slots:
            tenant, most = self._slab.pool.slots.tenants.of(slot), self._most(slot, share)
            seen[tenant] += 1
            if most is None or seen[tenant] <= most:
                yield slot

    def _most(self, slot: int, share: float = 1.0) -> int | None:
        """Blocks of whoever has this one that its quota has room for; None: no limit."""
        stride = self._slab.memory.stride
        limit = self._tier.book.owners.quotas.limit(self._slab.pool.slots.tenants.of(slot))
        return max(limit >= stride, int(share * limit) // stride) if limit else None

    def warmest(self, spaces: int) -> list[int]:
        """Slots of what DRAM holds, the most recently used first (a prefix before what follows on it), as far as our
        share of the tier goes."""
        return self._slab.pool.slots.by_use()[: self._tier.book.room(self._slab.memory.stride) // spaces]

    def keep(self, warmest: Sequence[int]) -> None:
        """What the SSD has of these is the last to go from now on."""
        for slot in reversed(warmest):
            self._tier.book.touch(self._name, self._slab.pool.slots[slot].key)

    def _reach(self, spaces: int) -> int:
        """No more than half of our share of the tier: else its blocks would push each other out for ever."""
        share = self._tier.book.capacity // self._slab.memory.stride // (2 * spaces)
        return min(self._ahead, share)

    def _place(self, slot: int) -> Placement | None:
        s, book = self._slab.pool.slots[slot], self._tier.book
        if book.writing(self._name, s.key):
            return None
        if book.find(self._name, s.key) is not None:
            book.touch(self._name, s.key)
            return None
        stride, tenant = self._slab.memory.stride, self._slab.pool.slots.tenants.of(slot)
        if not self._tier.make_room(tenant, stride):
            return None
        return book.place(self._name, stride, s.key, s.parent, s.length, tenant)

    def _write(self, slot: int, placement: Placement) -> Write:
        generation = self._slab.pins.generation(slot)
        return Write(self._slab, slot, generation, self._slab.pool.slots[slot].checksum, placement)

    # -- promotion ---------------------------------------------------------------------------------------------

    async def _read(self, blocks: Sequence[Block], owner: Owner, pool_class: PoolClass, deadline: float) -> Read:
        """In chunks, from the beginning: it is worth having alone."""
        read = Read()
        try:
            for chunk in _chunks(blocks):
                await self._try_chunk(chunk, owner, pool_class, deadline, read)
        except BaseException:
            self._slab.release(AGENT, read.holds)
            raise
        return read

    async def _try_chunk(
        self, chunk: Sequence[Block], owner: Owner, pool_class: PoolClass, deadline: float, read: Read
    ) -> None:
        left = deadline - asyncio.get_running_loop().time()
        room = self._slab.pool.room(pool_class)
        missing = PoolFull.code if left > 0 else DeadlineExceeded.code
        try:
            if left > 0 and room:
                await self._chunk(chunk[:room], owner, pool_class, left, read)
        except MooncakeError as e:
            missing = e.code
        for block in chunk:
            read.outcomes.setdefault(block.key, Outcome(error=missing))

    async def _chunk(
        self, blocks: Sequence[Block], owner: Owner, pool_class: PoolClass, timeout: float, read: Read
    ) -> None:
        held = await self._slab.reserve([b.key for b in blocks], AGENT, owner, pool_class, timeout)
        open_holds = {h.hold for h in held if h.hold}
        try:
            new = [(b, h) for b, h in zip(blocks, held, strict=True) if h.kind is Kind.NEW]
            for b, h in zip(blocks, held, strict=True):
                if h.kind is not Kind.NEW:
                    read.outcomes[b.key] = Outcome(error="" if h.kind is Kind.PRESENT else "in_progress")
            kept = [h.hold for h in held if h.kind is Kind.PRESENT]
            errors = await to_the_end(self._tier.read([Return(b, self._slab, h.slot) for b, h in new]))  # dest_held
            for b, h in new:
                outcome = read.outcomes[b.key] = self._arrived(b, h, owner, errors[b])
                kept += [] if outcome.error else [h.hold]
            read.holds += kept
            open_holds -= set(kept)
        finally:
            self._slab.release(AGENT, [h.hold for h in held if h.hold in open_holds])

    def _arrived(self, block: Block, held: Held, owner: Owner, error: str) -> Outcome:
        if error:
            self._tier.tally.lose(error)
            logger.warning("block on the SSD is of no use", key=block.key.hex(), reason=error)
            if self._tier.book.find(self._name, block.key) is block:
                self.remove(block.key)
            return Outcome(error=ChecksumMismatch.code if error == "checksum" else error)
        if block.gone:
            return Outcome(error="absent")  # removed meanwhile
        self._slab.commit(
            AGENT,
            [held.hold],
            block.parent,
            [block.key],
            [block.length],
            fetched_by=owner.id or SSD_TRANSPORT,
            checksums=[block.checksum],
            tenants=[block.tenant],
        )
        self._tier.tally.hit()
        return Outcome(SSD_TRANSPORT, block.length)


def _chunks(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    for at in range(0, len(blocks), CHUNK):
        yield blocks[at : at + CHUNK]
