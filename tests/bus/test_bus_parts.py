"""Parts: any order, repeated, lost, interleaved, garbage; memory and time bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus_parts import HEAD, MAX_MESSAGE, Reassembly, is_part, split

payloads = st.binary(min_size=1, max_size=2000)
limits = st.integers(HEAD + 1, HEAD + 300)


def id_of(n: int) -> bytes:
    return n.to_bytes(16, "little")


@given(payloads, limits)
def test_parts_obey_the_limit_and_join_again(payload: bytes, limit: int) -> None:
    parts = list(split(payload, limit, id_of(1)))
    assert all(len(part) <= limit and is_part(part) for part in parts)
    whole = [Reassembly().add(part, 0.0) for part in parts[:-1]]
    assert whole == [None] * (len(parts) - 1)
    joined = Reassembly()
    assert [joined.add(part, 0.0) for part in parts][-1] == payload
    assert joined.held == 0 and len(joined) == 0


@given(st.lists(payloads, min_size=1, max_size=5), limits, st.integers(0, 2**32), st.integers(0, 3))
def test_interleaved_repeated_and_shuffled(messages: list[bytes], limit: int, seed: int, repeats: int) -> None:
    rng = random.Random(seed)
    parts = [part for n, payload in enumerate(messages) for part in split(payload, limit, id_of(n))]
    rng.shuffle(parts)
    joined, out = Reassembly(), []
    for part in parts:
        whole = joined.add(part, 0.0)
        if whole is not None:
            out.append(whole)
    assert sorted(out) == sorted(messages)
    for part in rng.sample(parts, min(repeats, len(parts))):  # late copies of finished messages start nothing lasting
        joined.add(part, 1.0)
    joined.expire(100.0)
    assert joined.held == 0 and len(joined) == 0


@given(st.binary(min_size=2, max_size=2000), limits)
def test_a_part_that_comes_twice_does_no_harm(payload: bytes, limit: int) -> None:
    parts = list(split(payload, min(limit, HEAD + len(payload) - 1), id_of(1)))
    joined = Reassembly()
    whole = [joined.add(part, 0.0) for part in parts[:-1] for _ in range(2)]
    assert not any(whole) and joined.add(parts[-1], 0.0) == payload and joined.dropped == 0


@given(payloads, limits, st.integers(0, 2**32))
def test_a_lost_part_ends_by_its_deadline(payload: bytes, limit: int, seed: int) -> None:
    parts = list(split(payload, limit, id_of(7)))
    parts.pop(random.Random(seed).randrange(len(parts)))
    joined = Reassembly(patience=5.0)
    assert all(joined.add(part, 0.0) is None for part in parts)
    joined.expire(5.0)
    assert joined.held == sum(len(part) - HEAD for part in parts)
    joined.expire(5.1)
    assert joined.held == 0 and joined.dropped == bool(parts)


@given(st.lists(st.one_of(st.binary(max_size=100), st.binary(max_size=60).map(lambda b: b"\xffMCP" + b)), max_size=30))
def test_garbage_is_dropped_and_harms_nothing(garbage: list[bytes]) -> None:
    joined = Reassembly()
    payload = bytes(range(200))
    parts = list(split(payload, HEAD + 50, id_of(1)))
    for index, junk in enumerate(garbage):
        joined.add(junk, 0.0)
        if index < len(parts) - 1:
            joined.add(parts[index], 0.0)
    results = [joined.add(part, 0.0) for part in parts]
    assert payload in results


def test_memory_is_bounded_oldest_goes_first() -> None:
    joined = Reassembly(limit=1000)
    for n in range(50):
        joined.add(next(iter(split(bytes(800), HEAD + 400, id_of(n)))), float(0))
        assert joined.held <= 1000
    assert joined.dropped == 48


def test_contradicting_parts_are_dropped() -> None:
    joined = Reassembly()
    first, second = split(bytes(100), HEAD + 50, id_of(1))
    other = list(split(bytes(90), HEAD + 50, id_of(1)))[1]
    assert joined.add(first, 0) is None
    assert joined.add(other, 0) is None
    assert len(joined) == 0 and joined.held == 0 and joined.dropped == 1
    assert joined.add(second, 0) is None


def test_what_cannot_be_sent_is_refused_before_sending() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        list(split(bytes(10), HEAD, id_of(1)))
    with pytest.raises(ValueError, match="do not fit"):
        list(split(bytes(MAX_MESSAGE + 1), 1 << 20, id_of(1)))
