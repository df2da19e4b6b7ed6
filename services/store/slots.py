"""The slots of one slab: what each holds, how many hold and use it, and which may be evicted. Pure.

A slot is free, being written, committed under a key, or removed (no longer found, but still held by somebody). It
comes back to the free list when it is neither committed nor held nor used.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from services.store.eviction import EvictionOrder, Rank
from services.store.tenants import Quotas, Tenants
from shared.engines.base import PoolClass
from shared.errors import DoesNotFit


class State(Enum):
    FREE = 0
    WRITING = 1
    COMMITTED = 2
    REMOVED = 3


@dataclass(slots=True)
class Slot:
    """``holds``: by engines and landings. ``soft``: prefetch holds, which yield to stronger classes. ``uses``: remote
    leases and outgoing transfers. ``length`` bytes are valid; the checksum (xxh3) follows the commit. ``fetched_by``
    is the owner whose fetch brought the block, until somebody else uses it."""

    state: State = State.FREE
    key: bytes = b""
    parent: bytes = b""
    holds: int = 0
    soft: int = 0
    uses: int = 0
    length: int = 0
    checksum: int | None = None
    fetched_by: str = ""

    @property
    def idle(self) -> bool:
        return self.state is State.COMMITTED and not self.holds and not self.uses


class Slots:
    """``claim(slot)`` is asked before a slot gets new bytes; False means that a copy out of it runs now.

    ``headroom`` slots are only for growth; ``prefetch`` bounds what prefetch may take. Keys that left are collected in
    ``dropped`` until the caller takes them, slots whose soft holds ended so in ``yielded``.
    """

    def __init__(
        self,
        count: int,
        claim: Callable[[int], bool],
        headroom: int,
        prefetch: int,
        quotas: Quotas | None = None,
        stride: int = 1,
    ) -> None:
        self.table = [Slot() for _ in range(count)]
        self.by_key: dict[bytes, int] = {}
        self.dropped: list[bytes] = []
        self.yielded: list[int] = []
        self.evictions = 0
        self.idle = 0
        self.yielding = 0
        self.reached = 0  # slots from the start that were ever handed out
        self._claim = claim
        self._headroom = headroom
        self._prefetch = prefetch
        self._free = list(range(count - 1, -1, -1))
        self._children: dict[bytes, int] = {}
        self._order = EvictionOrder(count)
        self.tenants = Tenants(quotas or Quotas(), stride, self._order)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, slot: int) -> Slot:
        return self.table[slot]

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that are written, held or used: neither free nor evictable."""
        return len(self.table) - len(self._free) - self.idle - self.yielding

    # -- room ------------------------------------------------------------------------------------------

    def limit(self, pool_class: PoolClass) -> int:
        """Slots that this class gets of an empty pool."""
        limit = len(self.table) - self._kept(pool_class)
        return min(limit, self._prefetch) if pool_class is PoolClass.PREFETCH else limit

    def check_fits(self, count: int, pool_class: PoolClass) -> None:
        """Raises DoesNotFit for what the empty pool could not give (rule: fits)."""
        if count > self.limit(pool_class):
            most = f"at most {self.limit(pool_class)} for {pool_class.name.lower()}"
            raise DoesNotFit(f"{count} slots are wanted, the pool gives {most}")

    def _kept(self, pool_class: PoolClass) -> int:
        """rule: headroom."""
        return 0 if pool_class is PoolClass.GROWTH else self._headroom

    def available(self, pool_class: PoolClass) -> int:
        yields = self.yielding if pool_class < PoolClass.PREFETCH else 0  # rule: prefetch_yields
        return len(self._free) + self.idle + yields

    def spare(self, pool_class: PoolClass) -> int:
        """Available, without what is kept for growth."""
        return max(0, self.available(pool_class) - self._kept(pool_class))

    def short(self, count: int, pool_class: PoolClass, keep: int) -> int:
        """Slots that are missing so that :meth:`take` could give ``count``; none where this is negative."""
        return count + max(keep, self._kept(pool_class)) - self.available(pool_class)

    def take(self, count: int, pool_class: PoolClass, keep: int) -> list[int] | None:
        """``count`` claimed slots for writing, evicting what it takes, or None: all or nothing. ``keep`` slots stay
        available for others."""
        if self.short(count, pool_class, keep) > 0:
            return None
        self.evict(count - len(self._free), pool_class)
        taken = self._claimed(count)
        for slot in taken or ():
            self.table[slot].state = State.WRITING
            self.reached = max(self.reached, slot + 1)
        return taken

    def _claimed(self, count: int) -> list[int] | None:
        taken: list[int] = []
        busy: list[int] = []
        while len(taken) < count and self._free:
            slot = self._free.pop()
            (taken if self._claim(slot) else busy).append(slot)
        self._free[:0] = busy
        if len(taken) == count:
            return taken
        self._free.extend(taken)
        return None

    def evict(self, count: int, pool_class: PoolClass = PoolClass.CACHE, ahead: bool = False) -> int:
        """Let up to ``count`` idle blocks go: the least recently used first, leaves before parents, what is softly
        pinned last, and not at all ``ahead`` of need."""
        done = 0
        while done < count and (slot := self._victim(pool_class, ahead)) is not None:
            self.forget(slot)
            done += 1
        self.evictions += done
        return done

    def evict_own(self, tenant: int, count: int) -> int:
        """Let up to ``count`` idle blocks of this tenant go, which has too many."""
        done = 0
        while done < count and (slot := self.tenants.pop(tenant, self._is_free_leaf)) is not None:
            self.forget(slot)
            done += 1
        self.evictions += done
        return done

    def _victim(self, pool_class: PoolClass, ahead: bool) -> int | None:
        slot = self._order.pop(self._is_free_leaf)
        if slot is not None and not self._order.kept(slot):
            return slot
        kept = slot
        slot = self._order.pop(self._is_leaf, yielding=True) if pool_class < PoolClass.PREFETCH else None
        if slot is None and not ahead:
            return kept
        if kept is not None:
            self._order.push(kept)
        return slot

    def trim(self, low: int, high: int, most: int) -> int:
        """Watermarks: with fewer than ``low`` free slots evict until ``high`` are free, at most ``most`` now."""
        return self.evict(min(high - len(self._free), most), ahead=True) if len(self._free) < low else 0

    def coming(self, count: int, tenant: int | None = None) -> list[int]:
        """The next ``count`` blocks that would be evicted, in that order. ``tenant``: those of its own that would go
        for its quota."""

        def pop() -> int | None:
            if tenant is None:
                return self._order.pop(self._is_free_leaf)
            return self.tenants.pop(tenant, self._is_free_leaf)

        out: list[int] = []
        leaves: dict[int, None] = {}
        above: list[Rank] = []
        gone: dict[bytes, int] = {}
        leaf = pop() if count > 0 else None
        while len(out) < count and (leaf is not None or above):
            if leaf is None or (above and above[0] < self._order.rank(leaf)):
                out.append(heapq.heappop(above)[2])
            else:
                leaves[leaf] = None
                out.append(leaf)
                leaf = next((slot for slot in iter(pop, None) if slot not in leaves), None)
            self._uncover(self.table[out[-1]].parent, gone, above, tenant)
        for slot in (*leaves, *(() if leaf is None else (leaf,))):
            self._order.push(slot) if tenant is None else self.tenants.push(slot)
        return out

    def by_use(self) -> list[int]:
        """All committed blocks, the most recently used first, a prefix before what follows on it."""
        return sorted(self.by_key.values(), key=self._order.stamps.__getitem__, reverse=True)

    def _uncover(self, parent: bytes, gone: dict[bytes, int], above: list[Rank], tenant: int | None) -> None:
        """One more of the parent's children would be gone: offer it where that was the last."""
        gone[parent] = gone.get(parent, 0) + 1
        slot = self.by_key.get(parent)
        if slot is not None and gone[parent] == self._children.get(parent):
            if tenant not in (None, self.tenants.of(slot)):
                return
            s = self.table[slot]
            if s.idle and not s.soft:
                heapq.heappush(above, self._order.rank(slot))

    def keep(self, slot: int, kept: bool) -> None:
        """A soft pin begins or ends: the block goes after all that are not pinned."""
        self._order.keep(slot, kept)
        self._settled(slot)

    @property
    def clock(self) -> float:
        """Grows with every use of a block."""
        return self._order.clock

    def _is_leaf(self, slot: int) -> bool:
        s = self.table[slot]
        return s.idle and not self._children.get(s.key)

    def _is_free_leaf(self, slot: int) -> bool:
        return self._is_leaf(slot) and not self.table[slot].soft

    # -- changes ---------------------------------------------------------------------------------------

    def change(self, slot: int, holds: int = 0, soft: int = 0, uses: int = 0) -> None:
        """The one place where counts change, so that what is idle is always known."""
        s = self.table[slot]
        self._count(s, -1)
        s.holds += holds
        s.soft += soft
        s.uses += uses
        self._count(s, 1)
        self._settled(slot)

    def _count(self, s: Slot, sign: int) -> None:
        if s.idle:
            self.yielding += sign if s.soft else 0
            self.idle += 0 if s.soft else sign

    def _settled(self, slot: int) -> None:
        """Offer the slot for eviction, or free it, where its state allows that now."""
        s = self.table[slot]
        if self._is_leaf(slot):
            self._order.push(slot, yielding=s.soft > 0)
            self.tenants.push(slot)
        elif s.state not in (State.COMMITTED, State.FREE) and not (s.holds or s.soft or s.uses):
            self.table[slot] = Slot()
            self._free.append(slot)

    def publish(self, slot: int, key: bytes, parent: bytes, length: int, fetched_by: str, tenant: int = 0) -> None:
        """WRITING -> COMMITTED. The key is not there yet. A parent that comes after the block is a lie, and would keep
        both for ever: it counts as none."""
        s = self.table[slot]
        if parent and key in self._children and self._comes_after(parent, key):
            parent = b""
        s.state, s.key, s.parent, s.length, s.fetched_by = State.COMMITTED, key, parent, length, fetched_by
        s.checksum = None
        self.by_key[key] = slot
        if parent:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._order.touch_middle(slot) if fetched_by else self._order.touch(slot)
        self.tenants.published(slot, tenant)
        self._count(s, 1)
        self._settled(slot)

    def _comes_after(self, key: bytes, other: bytes) -> bool:
        at: int | None = self.by_key.get(key)
        while at is not None and key != other:
            key = self.table[at].parent
            at = self.by_key.get(key)
        return key == other

    def forget(self, slot: int) -> None:
        """COMMITTED -> REMOVED, and FREE once nobody holds it. Its parent may be a leaf now."""
        s = self.table[slot]
        self._count(s, -1)
        s.state = State.REMOVED
        self.tenants.forgotten(slot)
        del self.by_key[s.key]
        self.dropped.append(s.key)
        if s.parent:
            self._orphan(s.parent)
        if s.soft:
            s.soft = 0
            self.yielded.append(slot)
        self._order.keep(slot, False)
        self._settled(slot)

    def _orphan(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            above = self.by_key.get(parent)
            if above is not None:
                self._settled(above)

    def touch(self, slots: Iterable[int], owner: str) -> None:
        """Used by ``owner``; give the leaf first. A fetched copy is not touched by the request that fetched it."""
        for slot in slots:
            s = self.table[slot]
            if s.fetched_by and s.fetched_by == owner:
                continue
            s.fetched_by = ""
            self._order.touch(slot)
            self._settled(slot)
