"""The pool of one slab: holds, two-phase writes and room by class, over :class:`Slots`. Pure: no clock, no asyncio.

``connection`` is an opaque number: whose holds they are. Holds end by release, by ``drop``, or, for prefetch, by
yielding to a stronger class. A hold that is over, or another's, is refused with StaleToken.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.store.slots import Slots, State
from services.store.tenants import Quotas, tag_of
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import InvalidInput, StaleToken


@dataclass(slots=True)
class Hold:
    """One hold of one connection on one slot. ``key``: what the slot is reserved for, b"" for a private slot.
    ``soft``: a block held for prefetch, which yields. ``bounded``: prefetch brought it, or is bringing it."""

    id: int
    slot: int
    connection: int
    owner: Owner
    pool_class: PoolClass
    key: bytes = b""
    soft: bool = False
    bounded: bool = False


def waiting(key: bytes) -> Held:
    return Held(0, -1, Kind.IN_PROGRESS, key)


class Pool:
    """See the module. Keys whose writer has committed or aborted are collected in ``settled``, keys that left the
    pool in ``slots.dropped``, until the caller takes them."""

    def __init__(
        self,
        slots: int,
        claim: Callable[[int], bool],
        headroom: int = 0,
        prefetch: int | None = None,
        quotas: Quotas | None = None,
        stride: int = 1,
    ) -> None:
        self.slots = Slots(slots, claim, headroom, slots if prefetch is None else prefetch, quotas, stride)
        self.settled: list[bytes] = []
        self.holds: dict[int, Hold] = {}
        self._prefetch = slots if prefetch is None else prefetch
        self._prefetched = 0
        self._writing: dict[bytes, int] = {}
        self._of_connection: dict[int, set[int]] = {}
        self._of_owner: dict[tuple[int, str], set[int]] = {}
        self._soft: dict[int, set[int]] = {}
        self._next = secrets.randbits(40)

    # -- looking ---------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        return self.slots.by_key.get(key)

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """Neither holds nor touches."""
        return [key in self.slots.by_key for key in keys]

    def in_progress(self, key: bytes) -> bool:
        return key in self._writing

    @property
    def prefetched(self) -> int:
        """Holds on what prefetch brought or is bringing."""
        return self._prefetched

    def room(self, pool_class: PoolClass) -> int:
        """Slots worth asking for: what the class gets of an empty pool; for prefetch, which does not wait, what it
        gets now."""
        if pool_class is not PoolClass.PREFETCH:
            return self.slots.limit(pool_class)
        return max(0, min(self._prefetch - self._prefetched, self.slots.spare(pool_class)))

    def held_by(self, connection: int) -> int:
        """Number of holds of a connection."""
        return len(self._of_connection.get(connection, ()))

    def owners(self) -> Iterator[tuple[tuple[int, str], list[Hold]]]:
        """(connection, owner id) and the holds of each."""
        for holder in tuple(self._of_owner):
            yield holder, self.held_by_owner(*holder)

    def held_by_owner(self, connection: int, owner: str) -> list[Hold]:
        return [self.holds[hold] for hold in sorted(self._of_owner.get((connection, owner), ()))]

    # -- holding ---------------------------------------------------------------------------------------

    def lease(
        self, keys: Sequence[bytes], connection: int, owner: Owner, pool_class: PoolClass = PoolClass.GROWTH
    ) -> list[Held | None]:
        """Hold what is committed; None where absent. Touches leaf first."""
        found = [self.slots.by_key.get(key) for key in keys]
        held = [None if slot is None else self._present(slot, connection, owner, pool_class) for slot in found]
        self.slots.touch((slot for slot in reversed(found) if slot is not None), owner.id)
        return held

    def _present(self, slot: int, connection: int, owner: Owner, pool_class: PoolClass) -> Held:
        hold = self._hold(slot, connection, owner, pool_class)
        return Held(hold.id, slot, Kind.PRESENT, self.slots[slot].key)

    def _hold(self, slot: int, connection: int, owner: Owner, pool_class: PoolClass, key: bytes = b"") -> Hold:
        self._next += 1
        hold = Hold(self._next, slot, connection, owner, pool_class, key)
        self.holds[hold.id] = hold
        self._join(hold)
        if pool_class is PoolClass.PREFETCH:
            hold.soft = self.slots[slot].state is State.COMMITTED
            hold.bounded = not hold.soft or self.slots[slot].fetched_by == owner.id
            self._prefetched += hold.bounded
        if hold.soft:
            self._soft.setdefault(slot, set()).add(hold.id)
        self.slots.change(slot, holds=not hold.soft, soft=hold.soft)
        return hold

    def release(self, connection: int, holds: Sequence[int]) -> None:
        """End holds, the last of a chain first, so that a leaf is touched before its parent. Idempotent. What is
        uncommitted is aborted: freed once its outgoing transfers have let go."""
        for hold_id in reversed(holds):
            hold = self.holds.get(hold_id)
            if hold is not None and hold.connection == connection:
                self.slots.touch((hold.slot,), hold.owner.id)
                self._end(hold)

    def drop(self, connection: int) -> None:
        """The process behind this connection is dead: all its holds end."""
        self.release(connection, sorted(self._of_connection.get(connection, ())))

    def hand_over(self, connection: int, holds: Iterable[int], to: int) -> None:
        """Holds change hands, for a landing whose quarantine outlives its connection. Raises StaleToken."""
        for hold in [self._own(connection, hold_id) for hold_id in holds]:
            self._leave(hold)
            hold.connection = to
            self._join(hold)

    def runs(self, connection: int, owner: str) -> None:
        """The landing is over and the request runs: what it holds counts as growth (rule: class_order)."""
        for hold in self.held_by_owner(connection, owner):
            if hold.pool_class is PoolClass.LANDING:
                hold.pool_class = PoolClass.GROWTH

    def _join(self, hold: Hold) -> None:
        self._of_connection.setdefault(hold.connection, set()).add(hold.id)
        self._of_owner.setdefault((hold.connection, hold.owner.id), set()).add(hold.id)

    def _leave(self, hold: Hold) -> None:
        _discard(self._of_connection, hold.connection, hold.id)
        _discard(self._of_owner, (hold.connection, hold.owner.id), hold.id)

    def _end(self, hold: Hold) -> None:
        self._forget_hold(hold)
        self.slots.change(hold.slot, holds=-(not hold.soft), soft=-hold.soft)

    def _forget_hold(self, hold: Hold) -> None:
        del self.holds[hold.id]
        self._leave(hold)
        self._settle(hold)
        self._prefetched -= hold.bounded
        if hold.soft:
            self._soft[hold.slot].discard(hold.id)
            if not self._soft[hold.slot]:
                del self._soft[hold.slot]

    def _yield_prefetched(self) -> None:
        """rule: prefetch_yields. What was evicted under a soft hold is held no more."""
        for slot in self.slots.yielded:
            for hold_id in tuple(self._soft.get(slot, ())):
                self._forget_hold(self.holds[hold_id])
        self.slots.yielded.clear()

    def use(self, slot: int) -> None:
        """A remote lease or an outgoing transfer holds the slot too (``source_held``); ends by ``unuse``."""
        self.slots.change(slot, uses=1)

    def unuse(self, slot: int) -> None:
        self.slots.change(slot, uses=-1)

    # -- writing ---------------------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[bytes], connection: int, owner: Owner, pool_class: PoolClass, keep: int = 0
    ) -> list[Held] | None:
        """Phase one. None when there is no room now; raises DoesNotFit, QuotaExceeded when there never is. A key
        that occurs twice is IN_PROGRESS the second time."""
        self.slots.check_fits(len(set(keys)), pool_class)
        self.slots.tenants.check(owner.tenant, len(set(keys)), pool_class)
        new = list(dict.fromkeys(k for k in keys if k not in self.slots.by_key and k not in self._writing))
        present = self.lease([k for k in keys if k in self.slots.by_key], connection, owner, pool_class)
        slots = self._take(len(new), owner, pool_class, keep)
        if slots is None:
            self.release(connection, [held.hold for held in present if held is not None])
            return None
        fresh, here = dict(zip(new, slots, strict=True)), iter(present)
        out: list[Held] = []
        for key in keys:
            held = next(here) if key in self.slots.by_key else None
            slot = fresh.pop(key, None)
            if slot is not None:
                held = self._reserved(slot, key, connection, owner, pool_class)
            out.append(held or waiting(key))
        return out

    def _reserved(self, slot: int, key: bytes, connection: int, owner: Owner, pool_class: PoolClass) -> Held:
        hold = self._hold(slot, connection, owner, pool_class, key)
        self._writing[key] = hold.id
        if pool_class >= PoolClass.PREFETCH:
            self.slots.tenants.reserve(owner.tenant, 1)
        return Held(hold.id, slot, Kind.NEW, key)

    def allocate(
        self, count: int, connection: int, owner: Owner, pool_class: PoolClass, keep: int = 0
    ) -> list[Held] | None:
        """Private slots, all or nothing; None and DoesNotFit as in ``reserve``."""
        self.slots.check_fits(count, pool_class)
        slots = self._take(count, owner, pool_class, keep)
        if slots is None:
            return None
        return [Held(self._hold(s, connection, owner, pool_class).id, s, Kind.NEW) for s in slots]

    def _take(self, count: int, owner: Owner, pool_class: PoolClass, keep: int) -> list[int] | None:
        """Who is over its quota makes way for itself first, so that nobody else's blocks go for it."""
        tenant = tag_of(owner.tenant)
        excess = self.slots.tenants.excess(tenant, count) if count else 0
        if excess and self.slots.evict_own(tenant, excess) < excess and pool_class >= PoolClass.PREFETCH:
            return None
        if pool_class is PoolClass.PREFETCH and self._prefetched + count > self._prefetch:
            return None
        slots = self.slots.take(count, pool_class, keep)
        self._yield_prefetched()
        return slots

    def commit(
        self,
        connection: int,
        holds: Sequence[int],
        parent: bytes,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        fetched_by: str = "",
        chained: bool = True,
        tenants: Sequence[int] = (),
    ) -> list[Held]:
        """Phase two: visible at once. All holds are checked before the first is committed. A slot whose key is present
        by now stays private (NEW). Not ``chained``: each key comes after ``parent`` itself. ``tenants``: whose each
        block is, where that is not who holds it. Raises StaleToken, InvalidInput."""
        found = [self._committable(connection, hold, key) for hold, key in zip(holds, keys, strict=True)]
        if len({hold.slot for hold in found}) != len(found):
            raise InvalidInput("a slot is committed twice", field="holds")
        out: list[Held] = []
        of = tenants or [tag_of(hold.owner.tenant) for hold in found]
        for hold, key, length, tenant in zip(found, keys, lengths, of, strict=True):
            out.append(self._commit(hold, b"" if parent == key else parent, key, length, fetched_by, tenant))
            parent = key if chained else parent
        if not fetched_by:
            self.slots.touch((hold.slot for hold in reversed(found)), "")
        return out

    def _own(self, connection: int, hold_id: int) -> Hold:
        hold = self.holds.get(hold_id)
        if hold is None or hold.connection != connection:
            raise StaleToken(f"hold {hold_id} is not held by this connection")
        return hold

    def _committable(self, connection: int, hold_id: int, key: bytes) -> Hold:
        hold = self._own(connection, hold_id)
        slot = self.slots[hold.slot]
        if slot.state is State.COMMITTED and slot.key != key:
            raise StaleToken(f"hold {hold_id} was committed before, under another key")
        if not key or (hold.key and hold.key != key):
            raise InvalidInput("the slot was reserved for another key", field="keys")
        return hold

    def _commit(self, hold: Hold, parent: bytes, key: bytes, length: int, fetched_by: str, tenant: int) -> Held:
        self._settle(hold)
        state = self.slots[hold.slot].state
        if state is State.WRITING and key not in self.slots.by_key:
            self.slots.publish(hold.slot, key, parent, length, fetched_by, tenant)
            self.settled.append(key)
            self._soften(hold)
        committed = self.slots[hold.slot].state is State.COMMITTED
        return Held(hold.id, hold.slot, Kind.PRESENT if committed else Kind.NEW, key)

    def _soften(self, hold: Hold) -> None:
        """Prefetched bytes are in: from now on they yield."""
        if hold.pool_class is PoolClass.PREFETCH:
            hold.soft = True
            self._soft.setdefault(hold.slot, set()).add(hold.id)
            self.slots.change(hold.slot, holds=-1, soft=1)

    def _settle(self, hold: Hold) -> None:
        """The reservation of a key ends, by commit or abort."""
        if hold.key and self._writing.get(hold.key) == hold.id:
            del self._writing[hold.key]
            self.settled.append(hold.key)
            if hold.pool_class >= PoolClass.PREFETCH:
                self.slots.tenants.reserve(hold.owner.tenant, -1)
        hold.key = b""

    def remove(self, key: bytes) -> bool:
        """Not found from now on. Whoever holds, leases or reads the slot keeps it to the end."""
        slot = self.slots.by_key.get(key)
        if slot is None:
            return False
        self.slots.forget(slot)
        self._yield_prefetched()
        return True


K = TypeVar("K")


def _discard(sets: dict[K, set[int]], key: K, value: int) -> None:
    """No empty set stays."""
    sets[key].discard(value)
    if not sets[key]:
        del sets[key]
