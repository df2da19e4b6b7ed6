"""The small pure parts: cutting, joining neighbours, policy, the endpoint pool, the ledger."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer.endpoints import EndpointPool
from services.store.transfer.ledger import REMEMBERED, Ledger
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.segments import Segment
from services.store.transfer.spans import merge, views
from services.store.transfer.topology.slices import SLICE_CEILING, SLICE_FLOOR, cut, slice_size
from shared.errors import ConfigError

LENGTHS = st.integers(1, 1 << 28)


@given(LENGTHS, st.integers(0, 1 << 34), st.integers(1, 8))
def test_slices_tile_the_request_within_floor_and_ceiling(length: int, queued: int, streams: int) -> None:
    size = slice_size(length, queued, streams)
    assert SLICE_FLOOR <= size <= SLICE_CEILING
    pieces = cut(length, size, length)
    assert [at for at, _ in pieces] == [0, *accumulate(n for _, n in pieces)][:-1]
    assert sum(n for _, n in pieces) == length and all(0 < n <= SLICE_CEILING for _, n in pieces)
    assert all(n >= SLICE_FLOOR for _, n in pieces[:-1])


@given(st.integers(1, 1 << 20), st.integers(2, 5000), st.integers(SLICE_FLOOR, SLICE_CEILING))
def test_slices_of_a_run_are_whole_requests(step: int, count: int, size: int) -> None:
    pieces = cut(step * count, size, step)
    assert [at for at, _ in pieces] == [0, *accumulate(n for _, n in pieces)][:-1]
    assert sum(n for _, n in pieces) == step * count
    assert all(n and n % step == 0 and n <= max(size, step) for _, n in pieces)


def test_deep_queues_make_large_slices() -> None:
    assert slice_size(1 << 30, 0, 4) == SLICE_CEILING
    assert slice_size(1 << 20, 1 << 30, 4) == SLICE_CEILING


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 20)), max_size=30))
def test_joined_neighbours_are_the_same_bytes(ranges: list[tuple[int, int, int]]) -> None:
    segments = [Segment(str(i), memoryview(bytearray(range(i, 100 + i))), "cpu:0") for i in range(2)]
    spans = [(segments[i], offset, length) for i, offset, length in ranges]
    assert b"".join(views(spans)) == b"".join(bytes(s.view(o, n)) for s, o, n in spans)
    assert len(merge(spans)) <= len(spans)


def test_a_run_of_neighbours_is_one_buffer() -> None:
    segment = Segment("s", memoryview(bytearray(4096)), "cpu:0")
    assert merge((segment, i * 16, 16) for i in range(256)) == [(segment, 0, 4096)]


def test_policies() -> None:
    assert TransportPolicy.parse("prefer:shm,tcp") == TransportPolicy(("shm", "tcp"), False)
    assert TransportPolicy.parse("require:tcp") == TransportPolicy(("tcp",), True)
    for wrong in ("", "tcp", "prefer:", "require:shm,tcp", "prefer:tcp,tcp", "prefer:carrier-pigeon", "maybe:tcp"):
        with pytest.raises(ConfigError):
            TransportPolicy.parse(wrong)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_the_pool_keeps_its_cap_and_spares_the_busy(cap: int, steps: list[tuple[int, bool]]) -> None:
    pool: EndpointPool[int] = EndpointPool(cap)
    busy: set[int] = set()
    members: set[int] = set()
    for key, works in steps:
        admitted, victim = pool.admit(key, busy.__contains__)
        assert victim not in busy and (victim is None or victim in members)
        members.discard(-1 if victim is None else victim)
        if admitted:
            members.add(key)
            (busy.add if works else busy.discard)(key)
        else:
            assert members <= busy and len(members) == cap
        assert len(pool) == len(members) <= cap and all(member in pool for member in members)


def test_sieve_spares_what_was_used() -> None:
    pool: EndpointPool[str] = EndpointPool(3)
    for key in "abc":
        pool.admit(key, lambda _: False)
    pool.touch("a")
    assert pool.admit("d", lambda _: False) == (True, "b")
    assert pool.admit("e", lambda _: False) == (True, "c")
    pool.remove("a")
    assert pool.admit("f", lambda _: False) == (True, None)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60), st.sets(st.integers(0, 3), min_size=1))
def test_drained_is_told_exactly_when_nothing_flies(steps: list[tuple[bool, int]], grants: set[int]) -> None:
    ledger, flying = Ledger(), [0, 0, 0, 0]
    told: list[int] = []
    for up, grant in steps:
        if up:
            ledger.post(grant)
            flying[grant] += 1
        elif flying[grant]:
            ledger.land(grant)
            flying[grant] -= 1
        waits = any(flying[g] for g in grants)
        assert ledger.flying(grants) == waits
        told.clear()
        stop = ledger.when_drained(grants, lambda: told.append(1))
        assert bool(told) != waits
        stop()
    assert ledger.outstanding() == {g for g in range(4) if flying[g]}


def test_refusals_are_for_good_but_bounded() -> None:
    ledger = Ledger()
    ledger.refuse([0, 5])
    assert not ledger.refuses(0) and ledger.refuses(5)
    ledger.refuse(range(10, 10 + REMEMBERED))
    assert not ledger.refuses(5) and ledger.refuses(10)
