"""The pool's rules one by one: order of eviction, room by class, who may commit what."""

from __future__ import annotations

import hashlib

import pytest

from services.store.pool import Pool
from services.store.waiting import Line
from shared.engines.base import Kind, Owner, PoolClass
from shared.errors import DoesNotFit, InvalidInput, MooncakeError, StaleToken

NOBODY = Owner("nobody")


def name(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


def chain(which: int, length: int) -> list[bytes]:
    return [name(which, i) for i in range(length)]


def always(_slot: int) -> bool:
    return True


def fill(pool: Pool, keys: list[bytes], parent: bytes = b"", connection: int = 1, fetched_by: str = "") -> None:
    """Commit ``keys`` as a chain and let them go."""
    held = pool.reserve(keys, connection, NOBODY, PoolClass.PREFILL)
    assert held is not None
    pool.commit(connection, [h.hold for h in held], parent, keys, [8] * len(keys), fetched_by)
    pool.release(connection, [h.hold for h in held])


def test_the_oldest_goes_first_and_leaves_before_parents() -> None:
    pool = Pool(6, always)
    old, new = chain(0, 3), chain(1, 3)
    fill(pool, old)
    fill(pool, new)
    gone: list[bytes] = []
    for _ in range(6):
        pool.slots.evict(1)
        gone += pool.slots.dropped
        pool.slots.dropped.clear()
    assert gone == [*reversed(old), *reversed(new)]


def test_a_parent_outlives_its_children_even_when_they_were_used_later() -> None:
    pool = Pool(4, always)
    parent, child = chain(0, 2)
    fill(pool, [parent])
    fill(pool, [name("other")])
    fill(pool, [child], parent)
    pool.slots.evict(1)
    assert pool.slots.dropped == [name("other")]
    pool.slots.evict(1)
    assert pool.slots.dropped[1:] == [child]


def test_a_held_continuation_keeps_its_prefix() -> None:
    pool = Pool(3, always)
    keys = chain(0, 3)
    fill(pool, keys)
    (held,) = pool.lease(keys[2:], 1, NOBODY)
    assert pool.slots.evict(3) == 0
    assert held is not None
    pool.release(1, [held.hold])
    assert pool.slots.evict(3) == 3


def test_a_fetched_copy_enters_in_the_middle_until_somebody_else_uses_it() -> None:
    pool = Pool(5, always)
    for i in range(4):
        fill(pool, [name(i)])
    fill(pool, [name("fetched")], fetched_by="nobody")
    order = []
    for _ in range(5):
        pool.slots.evict(1)
        order.append(pool.slots.dropped.pop())
    assert order.index(name("fetched")) in (2, 3)

    for i in range(4):
        fill(pool, [name(i)])
    fill(pool, [name("fetched")], fetched_by="nobody")
    (held,) = pool.lease([name("fetched")], 1, Owner("somebody else"))
    assert held is not None
    pool.release(1, [held.hold])
    pool.slots.evict(4)
    assert pool.find(name("fetched")) is not None


def test_existence_probes_do_not_touch() -> None:
    pool = Pool(2, always)
    fill(pool, [name(0)])
    fill(pool, [name(1)])
    assert pool.contains([name(0), name(2)]) == [True, False]
    pool.slots.evict(1)
    assert pool.slots.dropped == [name(0)]


def test_prefetched_blocks_yield_to_stronger_classes_only() -> None:
    pool = Pool(2, always)
    held = pool.reserve(chain(0, 2), 1, NOBODY, PoolClass.PREFETCH)
    assert held is not None
    pool.commit(1, [h.hold for h in held], b"", chain(0, 2), [8, 8])
    assert pool.allocate(1, 2, NOBODY, PoolClass.PREFETCH) is None
    assert pool.allocate(1, 2, NOBODY, PoolClass.CACHE) is None
    taken = pool.allocate(1, 2, NOBODY, PoolClass.LANDING)
    assert taken is not None and taken[0].slot == held[1].slot  # the leaf
    assert held[1].hold not in pool.holds and held[0].hold in pool.holds
    assert pool.prefetched == 1


def test_prefetch_is_bounded() -> None:
    pool = Pool(4, always, prefetch=2)
    assert pool.allocate(2, 1, NOBODY, PoolClass.PREFETCH) is not None
    assert pool.allocate(1, 1, NOBODY, PoolClass.PREFETCH) is None
    with pytest.raises(DoesNotFit):
        pool.allocate(3, 1, NOBODY, PoolClass.PREFETCH)


def test_landing_leaves_the_growth_headroom() -> None:
    pool = Pool(4, always, headroom=1)
    with pytest.raises(DoesNotFit):
        pool.allocate(4, 1, NOBODY, PoolClass.LANDING)
    assert pool.allocate(3, 1, NOBODY, PoolClass.LANDING) is not None
    assert pool.allocate(1, 1, NOBODY, PoolClass.PREFILL) is None
    assert pool.allocate(1, 1, NOBODY, PoolClass.GROWTH) is not None


def test_growth_first_then_the_older_and_a_younger_one_takes_only_what_they_do_not_need() -> None:
    line = Line()
    old = line.want(3, Owner("old", 1.0), PoolClass.LANDING)
    young = line.want(2, Owner("young", 2.0), PoolClass.PREFILL)
    growth = line.want(1, Owner("youngest", 3.0), PoolClass.GROWTH)
    prefetch = line.want(1, Owner("oldest", 0.0), PoolClass.PREFETCH)
    for want in (young, prefetch, old, growth):
        line.join(want)
    assert list(line) == [growth, old, young, prefetch]
    assert line.kept_from(growth) == 0
    assert line.kept_from(old) == 1
    assert line.kept_from(young) == 3
    line.leave(old)
    assert line.kept_from(young) == 1


def test_a_batch_with_a_key_twice_reserves_it_once() -> None:
    pool = Pool(4, always)
    held = pool.reserve([name(0), name(1), name(0)], 1, NOBODY, PoolClass.PREFILL)
    assert held is not None
    assert [h.kind for h in held] == [Kind.NEW, Kind.NEW, Kind.IN_PROGRESS]


def test_commit_is_checked_whole_before_it_begins() -> None:
    pool = Pool(4, always)
    held = pool.reserve([name(0), name(1)], 1, NOBODY, PoolClass.PREFILL)
    assert held is not None
    for holds, keys, error in (
        ([held[0].hold, 12345], [name(0), name(1)], StaleToken),
        ([held[0].hold, held[1].hold], [name(0), name(2)], InvalidInput),
        ([held[0].hold, held[0].hold], [name(0), name(0)], MooncakeError),
    ):
        with pytest.raises(error):
            pool.commit(1, holds, b"", keys, [8, 8])
        assert pool.contains([name(0), name(1)]) == [False, False]
    with pytest.raises(StaleToken):
        pool.commit(2, [held[0].hold], b"", [name(0)], [8])  # another connection's


def test_the_second_writer_of_a_private_block_keeps_it_private() -> None:
    pool = Pool(4, always)
    a = pool.allocate(1, 1, NOBODY, PoolClass.GROWTH)
    b = pool.allocate(1, 2, NOBODY, PoolClass.GROWTH)
    assert a is not None and b is not None
    assert pool.commit(1, [a[0].hold], b"", [name(0)], [8])[0].kind is Kind.PRESENT
    assert pool.commit(2, [b[0].hold], b"", [name(0)], [8])[0].kind is Kind.NEW
    assert pool.find(name(0)) == a[0].slot
    pool.release(2, [b[0].hold])
    assert pool.slots.free == 3


def test_a_removed_block_stays_with_who_holds_it_and_is_not_committed_again() -> None:
    pool = Pool(2, always)
    fill(pool, [name(0)])
    (held,) = pool.lease([name(0)], 1, NOBODY)
    assert held is not None
    assert pool.remove(name(0)) and not pool.remove(name(0))
    assert pool.slots.free == 1
    assert pool.commit(1, [held.hold], b"", [name(0)], [8])[0].kind is Kind.NEW
    assert pool.find(name(0)) is None
    pool.release(1, [held.hold])
    assert pool.slots.free == 2


def test_a_block_that_names_itself_as_its_parent_can_still_go() -> None:
    pool = Pool(1, always)
    fill(pool, [name(0)], parent=name(0))
    assert pool.slots.evict(1) == 1
