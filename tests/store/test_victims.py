"""The victims that are foretold are those that eviction takes, in that order, and foretelling changes nothing."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from services.store.pool import Pool
from shared.engines.base import Owner, PoolClass

NOBODY = Owner("nobody")
KEYS = [bytes([i]) * 16 for i in range(12)]

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True), st.booleans()
        ),
        st.tuples(st.just("hold"), st.sampled_from(KEYS), st.sampled_from([PoolClass.GROWTH, PoolClass.PREFETCH])),
        st.tuples(st.just("touch"), st.sampled_from(KEYS), st.none()),
        st.tuples(st.just("remove"), st.sampled_from(KEYS), st.none()),
        st.tuples(st.just("evict"), st.integers(1, 3), st.none()),
        st.tuples(st.just("foretell"), st.integers(0, 9), st.none()),
    ),
    max_size=30,
)


def build(moves: list[Any], foretelling: bool) -> Pool:
    pool = Pool(9, lambda slot: True)
    for move, what, how in moves:
        if move == "write":
            held = pool.reserve(what, 1, NOBODY, PoolClass.PREFILL)
            new = [h for h in held or () if h.slot >= 0 and h.key not in pool.slots.by_key]
            pool.commit(1, [h.hold for h in new], KEYS[0], [h.key for h in new], [8] * len(new), "me" if how else "")
            pool.release(1, [h.hold for h in held or ()])
        elif move == "hold":
            pool.lease([what], 2, NOBODY, how)
        elif move == "touch":
            pool.release(3, [h.hold for h in pool.lease([what], 3, NOBODY) if h is not None])
        elif move == "remove":
            pool.remove(what)
        elif move == "evict":
            pool.slots.evict(what)
        elif foretelling:
            pool.slots.coming(what)
    return pool


@given(steps, st.integers(0, 9))
def test_the_victims_are_those_foretold(moves: list[Any], count: int) -> None:
    pool, silent = build(moves, True), build(moves, False)
    coming = [pool.slots[slot].key for slot in pool.slots.coming(count)]
    for one in (pool, silent):
        one.slots.dropped.clear()
        one.slots.evict(count)
        assert one.slots.dropped == coming
