"""Stream entries: packed and unpacked, cut over shards and put together again in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import KEY
from shared.errors import ProtocolError
from shared.index import shard_of
from shared.index.assembly import Chain, Partials, chains
from shared.index.batches import MOST_BATCH, Change, cut
from shared.index.digest import State, rotated, unpack_state, xor_keys
from shared.index.entry import ADD, Entry, pack, pack_heads, unpack, unpack_heads
from shared.index.forest import ROOT, UNKNOWN

keys = st.binary(min_size=KEY, max_size=KEY)
numbers = st.integers(0, 2**53 - 1)


@given(st.lists(keys, max_size=20), numbers, numbers, st.integers(0, 2**128 - 1), st.integers(1, 5), st.integers(0, 1))
def test_entries_come_back(some: list[bytes], seq: int, size: int, xor: int, op: int, tier: int) -> None:
    heads = pack_heads([(index, key) for index, key in enumerate(some) if index % 3 == 0])
    positions = bytes(2 * len(some))
    entry = Entry(op, b"\xff" * 8, State(seq, size, xor), b"".join(some), tier, 1, 7, 8, positions, heads)
    assert unpack(pack(entry)) == entry
    assert [key for _, key in unpack_heads(heads)] == some[::3]
    assert unpack_state(entry.state.pack()) == entry.state


@given(st.binary(max_size=100))
def test_garbage_is_an_error_of_the_protocol(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(garbage)
    with pytest.raises(ProtocolError):
        unpack(pack(Entry(ADD, bytes(8), State())) + b"x" + garbage)


@given(st.lists(keys, max_size=60))
def test_digest_is_the_xor_of_all(some: list[bytes]) -> None:
    expected = 0
    for key in some:
        expected ^= int.from_bytes(key, "big")
    assert xor_keys(b"".join(some)) == expected
    assert rotated(rotated(expected, 1), 3) == expected == rotated(expected, 0)


runs = st.lists(st.tuples(st.sampled_from(["root", "parent", "unknown"]), st.integers(1, 40)), min_size=1, max_size=8)


def changes_of(shape: list[tuple[str, int]], rng: random.Random) -> tuple[list[Change], list[Chain]]:
    changes: list[Change] = []
    expected: list[Chain] = []
    for how, length in shape:
        chain = [rng.randbytes(KEY) for _ in range(length)]
        parent: bytes | None = {"root": b"", "parent": rng.randbytes(KEY), "unknown": None}[how]
        heard = ROOT if how == "root" else UNKNOWN if how == "unknown" and length > 1 else parent
        expected.append((heard, b"".join(chain)))
        for key in chain:
            changes.append(Change(key, parent, -1, 0, len(changes)))
            parent = key
    return changes, expected


def entries_of(batch: list[Change], shards: int, rng: random.Random) -> list[Entry]:
    by_shard: dict[int, list[Change]] = {}
    for change in batch:
        change.batch, change.total = 1, len(batch)
        by_shard.setdefault(shard_of(change.key, shards), []).append(change)
    entries = []
    for changes in by_shard.values():
        size = rng.randint(1, len(changes))
        parts = [changes[at : at + size] for at in range(0, len(changes), size)]
        entries += [unpack(pack(part[0].entry(bytes(8), State(), part))) for part in parts]
    rng.shuffle(entries)
    return entries


@given(runs, st.sampled_from([1, 3, 16]), st.integers(0, 2**32))
def test_a_batch_cut_over_shards_gives_its_chains_again(shape: list[tuple[str, int]], shards: int, seed: int) -> None:
    rng = random.Random(seed)
    changes, expected = changes_of(shape, rng)
    (batch,) = cut(changes)
    entries = entries_of(batch, shards, rng)
    assert chains(entries) == expected
    partials, out = Partials(), []
    pieces = [entries[: len(entries) // 2], entries[len(entries) // 2 :]]
    for piece in filter(None, pieces):
        out += partials.add(piece, 0.0)
    assert out == (expected if all(pieces) else []) and len(partials) == 0


@given(runs, st.integers(0, 2**32))
def test_what_is_missing_costs_links_never_keys(shape: list[tuple[str, int]], seed: int) -> None:
    rng = random.Random(seed)
    changes, expected = changes_of(shape, rng)
    (batch,) = cut(changes)
    entries = entries_of(batch, 5, rng)[1:]
    got = chains(entries) if entries else []
    assert sorted(key for _, chain in got for key in [chain[i : i + KEY] for i in range(0, len(chain), KEY)]) == sorted(
        key for entry in entries for key in [entry.keys[i : i + KEY] for i in range(0, len(entry.keys), KEY)]
    )
    whole = b"|".join(chain for _, chain in expected)
    assert all(chain in whole for _, chain in got)


def test_batches_end_at_their_size_and_where_the_tier_changes() -> None:
    rng = random.Random(0)
    changes = [Change(rng.randbytes(KEY), b"", -1, 0, n) for n in range(MOST_BATCH + 1)]
    changes += [Change(rng.randbytes(KEY), None, -1, 1, 0), Change(rng.randbytes(KEY), None, 1, -1, 0)]
    assert [len(batch) for batch in cut(changes)] == [MOST_BATCH, 1, 1, 1]


def test_partials_are_few_and_do_not_last() -> None:
    partials = Partials()
    for batch in range(1, 200):
        partials.add([Entry(ADD, bytes(8), State(), bytes(KEY), batch=batch, total=2, positions=bytes(2))], 0.0)
    assert len(partials) == 64
    partials.add([Entry(ADD, bytes(8), State(), bytes(KEY), batch=300, total=2, positions=bytes(2))], 2.0)
    assert len(partials) == 1
