"""Pins against a plain model of them over a real pool, and pins of real agents (C4: pinned last or never)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.pinning import MAX_OWNERS, PinTable
from services.store.pool import Pool
from services.store.sync_client import SyncStoreClient
from shared.engines.base import Owner, PoolClass
from shared.errors import InvalidInput, PinLimit
from tests.examples import examples

NOBODY = Owner("nobody")
KEYS = [bytes([i]) * 16 for i in range(10)]
Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


def put(pool: Pool, keys: list[bytes], parent: bytes = b"") -> bool:
    held = pool.reserve(keys, 1, NOBODY, PoolClass.CACHE)
    if held is None:
        return False
    new = [h for h in held if h.slot >= 0 and h.key not in pool.slots.by_key]
    if new:
        pool.commit(1, [h.hold for h in new], parent, [h.key for h in new], [8] * len(new))
    pool.release(1, [h.hold for h in held])
    return True


class PinMachine(RuleBasedStateMachine):
    """Two owners pin, repin and unpin; blocks come, go and lie about their parents; time passes."""

    @initialize(slots=st.integers(2, 8), limit=st.integers(0, 8))
    def start(self, slots: int, limit: int) -> None:
        self.pool = Pool(slots, lambda slot: True)
        self.limit = limit
        self.table = PinTable(self.pool, limit)
        self.now = 100.0
        self.pins: dict[tuple[bytes, str], tuple[bool, float]] = {}

    def drain(self) -> None:
        """As the slab does after every change."""
        dropped, self.pool.slots.dropped = self.pool.slots.dropped, []
        self.table.gone(dropped)
        for key in dropped:
            for pin in [pin for pin in self.pins if pin[0] == key]:
                del self.pins[pin]

    def hard(self) -> set[bytes]:
        return {key for (key, _), (hard, _) in self.pins.items() if hard}

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True), parent=st.sampled_from(KEYS))
    def put(self, keys: list[bytes], parent: bytes) -> None:
        before = self.hard()
        if len(keys) <= len(self.pool.slots):
            put(self.pool, keys, parent)
        assert all(key in self.pool.slots.by_key for key in before), "a hard pin was evicted"
        self.drain()

    @rule(count=st.integers(1, 4), ahead=st.booleans())
    def evict(self, count: int, ahead: bool) -> None:
        soft = {key for (key, _), (hard, _) in self.pins.items() if not hard}
        self.pool.slots.evict(count, ahead=ahead)
        gone = set(self.pool.slots.dropped)
        assert not gone & self.hard(), "a hard pin was evicted"
        assert not (ahead and gone & soft), "a soft pin was evicted ahead of need"
        self.drain()

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: bytes) -> None:
        self.pool.remove(key)
        self.drain()

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from("ab"), hard=st.booleans(), ttl=st.sampled_from([1.0, 9.0]))
    def pin(self, key: bytes, owner: str, hard: bool, ttl: float) -> None:
        before = self.table.kept
        try:
            done = self.table.pin(self.now, key, owner, hard, ttl)
        except PinLimit:
            assert hard and not self.pins.get((key, owner), (False, 0))[0]
            assert self.table.kept == before
            return
        assert done == (key in self.pool.slots.by_key)
        if done:
            self.pins[key, owner] = (hard, self.now + ttl)

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from("ab"))
    def unpin(self, key: bytes, owner: str) -> None:
        assert self.table.unpin(key, owner) == (self.pins.pop((key, owner), None) is not None)

    @precondition(lambda self: self.pins)
    @rule(seconds=st.floats(0.1, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        over = [pin for pin, (_, until) in self.pins.items() if until <= self.now]
        assert self.table.expire(self.now) == len(over)
        for pin in over:
            del self.pins[pin]

    @invariant()
    def what_is_pinned_is_kept_and_within_its_bound(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.pins)
        assert self.table.kept <= self.limit
        kept = {i for i, s in enumerate(self.pool.slots.table) if s.uses}
        assert len(kept) == self.table.kept
        assert {self.pool.find(key) for key in self.hard()} <= kept

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.expire(math.inf)
            assert self.table.kept == len(self.table) == 0
            self.pool.slots.evict(len(self.pool.slots))
            assert self.pool.slots.free == len(self.pool.slots), "a slot is kept for ever"


PinMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestPinMachine = PinMachine.TestCase


def test_a_pinned_leaf_keeps_its_chain_and_counts_for_all_of_it() -> None:
    pool = Pool(6, lambda slot: True)
    put(pool, KEYS[:4])
    table = PinTable(pool, 4)
    assert table.pin(0.0, KEYS[3], "me", True, 10.0) and table.kept == 4
    put(pool, KEYS[4:6])
    with pytest.raises(PinLimit) as refused:
        table.pin(0.0, KEYS[4], "me", True, 10.0)
    assert "4 of at most 4" in refused.value.message
    assert table.pin(0.0, KEYS[1], "you", True, 10.0) and table.kept == 4
    table.unpin(KEYS[3], "me")
    assert table.kept == 2
    assert pool.slots.evict(6) == 4
    assert pool.contains(KEYS[:4]) == [True, True, False, False]


def test_soft_pins_go_last_and_at_need_only() -> None:
    pool = Pool(4, lambda slot: True)
    for key in KEYS[:4]:
        put(pool, [key])
    table = PinTable(pool, 0)
    assert all(table.pin(0.0, key, "me", False, 10.0) for key in KEYS[:2])
    assert [pool.slots[slot].key for slot in pool.slots.coming(4)] == [KEYS[2], KEYS[3], KEYS[0], KEYS[1]]
    assert pool.slots.trim(4, 4, 4) == 2
    assert pool.slots.dropped == [KEYS[2], KEYS[3]]
    put(pool, KEYS[4:7])
    assert KEYS[0] in pool.slots.dropped and pool.contains(KEYS[1:2]) == [True]


def test_a_block_has_a_bounded_number_of_owners() -> None:
    pool = Pool(1, lambda slot: True)
    put(pool, KEYS[:1])
    table = PinTable(pool, 1)
    for i in range(MAX_OWNERS):
        table.pin(0.0, KEYS[0], str(i), False, 1.0)
    table.pin(0.0, KEYS[0], "0", True, 1.0)
    with pytest.raises(PinLimit):
        table.pin(0.0, KEYS[0], "one more", False, 1.0)


# -- real agents -------------------------------------------------------------------------------------------


async def test_c4_pinned_blocks_survive_ten_times_the_capacity(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent(slots=16)
    client, other = await connect(a, "one"), await connect(a, "two")
    keys = [key(i) for i in range(6)]
    await client.put([(k, k) for k in keys])
    pinned = await client.pin([*keys[:4], key("absent"), keys[4]])
    assert [p.pinned for p in pinned] == [True] * 4 + [False, False]
    assert pinned[4].error is None and isinstance(pinned[5].error, PinLimit)
    assert "pin_share" in pinned[5].error.message
    assert [p.pinned for p in await client.pin([keys[5]], hard=False)] == [True]
    assert all(p.stored for p in await other.put([(key(("new", i)), b"x") for i in range(160)]))
    assert await client.get(keys[:4]) == keys[:4]
    assert (await client.stats())["store_pinned"] == 4

    assert await other.unpin(keys[:4]) == [False] * 4
    await client.close()
    again = await connect(a, "one")
    assert await again.unpin([keys[0], keys[0], key("absent")]) == [True, False, False]
    assert await again.remove(keys[1:2]) == [True]
    assert (await again.stats())["store_pinned"] == 2
    assert all(p.stored for p in await other.put([(key(("newer", i)), b"x") for i in range(160)]))
    assert await again.contains(keys[:4]) == [False, False, True, True]


async def test_pins_end_at_their_time_and_can_be_renewed(start_agent: Start, connect: Connect, key: Key) -> None:
    client = await connect(await start_agent(slots=8))
    await client.put([(key(0), b"x"), (key(1), b"y")])
    await client.pin([key(0), key(1)], ttl=0.2)
    await client.pin([key(1)], ttl=math.inf)
    async with asyncio.timeout(100):
        while (await client.stats())["store_pinned"] != 1:
            await asyncio.sleep(0.02)
    for ttl in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidInput):
            await client.pin([key(0)], ttl=ttl)
    assert await client.unpin([key(1)]) == [True]


async def test_the_sync_client_pins(start_agent: Start, key: Key) -> None:
    from tests.store.conftest import NAMESPACE

    a = await start_agent(slots=8)

    def work() -> list[Any]:
        with SyncStoreClient(a.settings.socket, NAMESPACE, secret="s") as client:
            client.put([(key(0), b"x")])
            return [client.pin([key(0), key(1)])[0].pinned, client.unpin([key(0)])]

    assert await asyncio.to_thread(work) == [True, [True]]
