"""The pool against a plain model of it."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.pool import Pool
from services.store.slots import State
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import DoesNotFit, StaleToken
from tests.examples import examples

NOBODY = Owner("nobody")
CLASSES = st.sampled_from(list(PoolClass))


def name(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


def chain(which: int, length: int) -> list[bytes]:
    return [name(which, i) for i in range(length)]


class PoolMachine(RuleBasedStateMachine):
    """Three connections do anything, stale ids included; ``claim`` refuses pinned slots."""

    @initialize(slots=st.integers(1, 9), headroom=st.integers(0, 2), prefetch=st.integers(0, 9))
    def start(self, slots: int, headroom: int, prefetch: int) -> None:
        self.pinned: set[int] = set()
        self.claimed: Counter[int] = Counter()
        self.pool = Pool(slots, self.claim, min(headroom, slots - 1), prefetch)
        self.held: dict[int, tuple[int, Held]] = {}  # hold id -> (connection, Held)
        self.over: list[tuple[int, int]] = []  # (connection, hold id) that have ended
        self.used: Counter[int] = Counter()
        self.readable: dict[bytes, int] = {}
        self.soft: set[int] = set()

    def claim(self, slot: int) -> bool:
        if slot in self.pinned:
            return False
        assert not self.used[slot], "a leased slot was reused"
        assert not any(h.slot == slot and i not in self.soft for i, (_, h) in self.held.items()), "two owners of a slot"
        self.claimed[slot] += 1
        return True

    def remember(self, connection: int, held: list[Held] | None, pool_class: PoolClass) -> None:
        for h in held or []:
            if h.hold:
                self.held[h.hold] = (connection, h)
                hold = self.pool.holds[h.hold]
                assert hold.slot == h.slot
        self.refresh()

    def refresh(self) -> None:
        """Prefetch holds may have yielded; nothing else ends by itself."""
        for hold_id in [i for i in self.held if i not in self.pool.holds]:
            assert hold_id in self.soft, "a hard hold ended by itself"
            connection, _ = self.held.pop(hold_id)
            self.over.append((connection, hold_id))
        self.soft = {i for i, hold in self.pool.holds.items() if hold.soft}

    @rule(c=st.integers(1, 3), which=st.integers(0, 3), n=st.integers(1, 4), pool_class=CLASSES, keep=st.integers(0, 2))
    def reserve(self, c: int, which: int, n: int, pool_class: PoolClass, keep: int) -> None:
        keys = chain(which, n)
        before = len(self.pool.holds)
        try:
            held = self.pool.reserve(keys, c, Owner("o", float(c)), pool_class, keep)
        except DoesNotFit:
            assert n > self.pool.slots.limit(pool_class)
            return
        if held is None:
            assert len(self.pool.holds) <= before  # all or nothing
        else:
            assert [h.key for h in held] == keys
        self.remember(c, held, pool_class)

    @rule(c=st.integers(1, 3), n=st.integers(0, 4), pool_class=CLASSES)
    def allocate(self, c: int, n: int, pool_class: PoolClass) -> None:
        try:
            held = self.pool.allocate(n, c, NOBODY, pool_class)
        except DoesNotFit:
            assert n > self.pool.slots.limit(pool_class)
            return
        assert held is None or len({h.slot for h in held}) == n
        self.remember(c, held, pool_class)

    @rule(c=st.integers(1, 3), which=st.integers(0, 3), n=st.integers(1, 4), pool_class=CLASSES)
    def lease(self, c: int, which: int, n: int, pool_class: PoolClass) -> None:
        keys = chain(which, n)
        present = self.pool.contains(keys)
        held = self.pool.lease(keys, c, NOBODY, pool_class)
        assert [h is not None for h in held] == present
        self.remember(c, [h for h in held if h is not None], pool_class)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), which=st.integers(0, 3), at=st.integers(0, 3), fetched=st.booleans())
    def commit(self, data: st.DataObject, which: int, at: int, fetched: bool) -> None:
        hold_id = data.draw(st.sampled_from(sorted(self.held)))
        c, h = self.held[hold_id]
        reserved = self.pool.holds[hold_id].key
        key = reserved or h.key or name(which, at)
        keys = chain(which, 4)
        parent = keys[keys.index(key) - 1] if key in keys[1:] else b""
        present = self.pool.find(key) is not None
        try:
            (out,) = self.pool.commit(c, [hold_id], parent, [key], [8], "o" if fetched else "")
        except StaleToken:
            assert self.pool.slots[h.slot].state is State.COMMITTED
            return
        if out.kind is Kind.PRESENT:
            assert self.pool.find(key) == h.slot
        else:
            assert present or self.pool.slots[h.slot].state is State.REMOVED
        self.held[hold_id] = (c, Held(hold_id, h.slot, out.kind, key))
        self.refresh()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold_id = data.draw(st.sampled_from(sorted(self.held)))
        c, _ = self.held.pop(hold_id)
        self.pool.release(c, [hold_id])
        self.over.append((c, hold_id))
        self.refresh()

    @rule(c=st.integers(1, 3))
    def die(self, c: int) -> None:
        self.pool.drop(c)
        for hold_id in [i for i, (owner, _) in self.held.items() if owner == c]:
            del self.held[hold_id]
            self.over.append((c, hold_id))
        self.refresh()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), c=st.integers(1, 3), to=st.integers(1, 3))
    def hand_over(self, data: st.DataObject, c: int, to: int) -> None:
        hold_id = data.draw(st.sampled_from(sorted(self.held)))
        owner, h = self.held[hold_id]
        self.pool.hand_over(owner, [hold_id], to)
        self.held[hold_id] = (to, h)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        """A token that is over, or another's, does nothing."""
        c, hold_id = data.draw(st.sampled_from(self.over))
        with pytest.raises(StaleToken):
            self.pool.commit(c, [hold_id], b"", [name("stale")], [8])
        self.pool.release(c, [hold_id])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """A lease or a transfer begins on a held slot."""
        hold_id = data.draw(st.sampled_from(sorted(self.held)))
        slot = self.held[hold_id][1].slot
        self.pool.use(slot)
        self.used[slot] += 1

    @precondition(lambda self: +self.used)
    @rule(data=st.data())
    def unuse(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.used)))
        self.used[slot] -= 1
        self.pool.unuse(slot)

    @rule(which=st.integers(0, 3), at=st.integers(0, 3))
    def remove(self, which: int, at: int) -> None:
        key = name(which, at)
        assert self.pool.remove(key) == (key in self.readable)
        self.refresh()

    @rule(slot=st.integers(0, 8), pin=st.booleans())
    def pin(self, slot: int, pin: bool) -> None:
        self.pinned.add(slot) if pin else self.pinned.discard(slot)

    @rule(n=st.integers(1, 4))
    def evict_ahead(self, n: int) -> None:
        self.pool.slots.trim(n, n + 1, 3)
        self.pool._yield_prefetched()
        self.refresh()

    # -- what must always hold -------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        slots = self.pool.slots
        hard = Counter(hold.slot for hold in self.pool.holds.values() if not hold.soft)
        soft = Counter(hold.slot for hold in self.pool.holds.values() if hold.soft)
        for i, s in enumerate(slots.table):
            assert (s.holds, s.soft, s.uses) == (hard[i], soft[i], self.used[i])
            assert s.state is not State.FREE or not (s.holds or s.soft or s.uses)
            assert s.state in (State.FREE, State.COMMITTED) or s.holds or s.soft or s.uses, "a leaked slot"
        assert slots.free == sum(s.state is State.FREE for s in slots.table)
        assert slots.idle == sum(s.idle and not s.soft for s in slots.table)
        assert slots.yielding == sum(s.idle and s.soft > 0 for s in slots.table)
        assert set(self.held) == set(self.pool.holds)

    @invariant()
    def keys_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        now = dict(self.pool.slots.by_key)
        for key in set(self.readable) - set(now):
            assert key in self.pool.slots.dropped, "a block vanished unseen"
        self.pool.slots.dropped.clear()
        self.pool.settled.clear()
        for key, slot in now.items():
            assert self.pool.slots[slot].key == key
        self.readable = now

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for slot, n in self.used.items():
            for _ in range(n):
                self.pool.unuse(slot)
        for c in (1, 2, 3):
            self.pool.drop(c)
        slots = self.pool.slots
        assert slots.used == 0 and not self.pool.holds and self.pool.prefetched == 0
        slots.evict(len(slots))
        assert slots.free == len(slots), "a block can never be evicted"


PoolMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
