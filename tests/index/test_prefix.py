"""The prefix index against sets: exact with holes, tiers, loose keys, unknown parents, dropped columns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.blocks import KEY, split_keys
from shared.index.forest import ROOT
from shared.index.prefix import PrefixIndex
from shared.index.runs import bitmap, last, packed, prefix
from tests.examples import examples

COLUMNS = 9


def key(parent: bytes, token: int) -> bytes:
    return hashlib.sha256(parent + bytes([token])).digest()[:KEY]


def chain(tokens: Sequence[int]) -> list[bytes]:
    out, parent = [], b"root"
    for token in tokens:
        parent = key(parent, token)
        out.append(parent)
    return out


@given(st.integers(0, 2**40))
def test_packing_of_what_is_held(mask: int) -> None:
    v = packed(mask)
    assert bitmap(v) == mask
    assert last(v) == mask.bit_length()
    assert prefix(v) == (~mask & (mask + 1)).bit_length() - 1


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)
columns = st.integers(0, COLUMNS - 1)
tiers = st.sampled_from([0, 0, 0, 1])


class Oracle(RuleBasedStateMachine):
    """``self.sets[column]``: key -> tier."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.columns = [self.index.add_column() for _ in range(COLUMNS)]
        self.sets: list[dict[bytes, int]] = [{} for _ in range(COLUMNS)]

    def effect(self, column: int, keys: list[bytes], tier: int) -> tuple[list[bytes], list[bytes]]:
        same, moved = [], []
        for k in keys:
            old = self.sets[column].get(k)
            if old == tier:
                same.append(k)
            elif old is not None:
                moved.append(k)
            self.sets[column][k] = tier
        return sorted(same), sorted(moved)

    @rule(
        column=columns,
        path=tokens,
        start=st.integers(0, 11),
        tier=tiers,
        how=st.sampled_from(["parent", "root", "none"]),
    )
    def store(self, column: int, path: list[int], start: int, tier: int, how: str) -> None:
        keys = chain(path)
        start = min(start, len(keys) - 1)
        parent: bytes | None = (keys[start - 1] if start else ROOT) if how == "parent" else None
        if how == "root":
            parent = hashlib.sha256(b"namespace").digest()[:KEY] if start == 0 else keys[start - 1]
        same, moved = self.index.store(self.columns[column], b"".join(keys[start:]), parent, tier)
        assert (sorted(same), sorted(moved)) == self.effect(column, keys[start:], tier)

    @rule(column=columns, path=tokens, start=st.integers(0, 11), backwards=st.booleans())
    def remove(self, column: int, path: list[int], start: int, backwards: bool) -> None:
        keys = chain(path)[start:]
        keys = keys[::-1] if backwards else keys
        held = self.sets[column]
        expected = sorted(k for k in keys if k not in held), sorted(k for k in keys if held.get(k) == 1)
        same, moved = self.index.remove(self.columns[column], b"".join(keys))
        assert (sorted(same), sorted(moved)) == expected
        for k in keys:
            held.pop(k, None)

    @rule(column=columns)
    def drop(self, column: int) -> None:
        self.index.drop(self.columns[column])
        self.columns[column] = self.index.add_column()
        self.sets[column] = {}

    @rule(most=st.integers(1, 4))
    def tidy(self, most: int) -> None:
        self.index.tidy(most)

    @precondition(lambda self: hasattr(self, "index"))
    @rule(path=tokens, cut=st.integers(0, 3))
    def match(self, path: list[int], cut: int) -> None:
        keys = chain(path)[cut if cut == 3 else 0 :]  # at times a chain that does not begin at its root
        lengths = self.index.match(b"".join(keys))
        fast = self.index.fast(b"".join(keys), lengths)
        for column, held in zip(self.columns, self.sets, strict=True):
            here = next((i for i, k in enumerate(keys) if k not in held), len(keys))
            dram = next((i for i, k in enumerate(keys[:here]) if held[k]), here)
            assert (lengths[column], fast[column]) == (here, dram)

    @invariant()
    def tiers(self) -> None:
        if not hasattr(self, "index"):
            return
        for column, held in zip(self.columns, self.sets, strict=True):
            for k in list(held)[:5]:
                assert self.index.tier(column, k) == held[k]

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for column, held in zip(self.columns, self.sets, strict=True):
            self.index.remove(column, b"".join(held))
        while self.index.tidy():
            pass
        assert len(self.index.places) == 0 == self.index.places.loose
        assert not self.index.loose_slow and not any(self.index.slow) and not any(self.index.held)


Oracle.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestOracle = Oracle.TestCase


def test_runs_longer_than_the_limit_and_forks_inside() -> None:
    index, rng = PrefixIndex(), np.random.default_rng(1)
    keys = [rng.bytes(KEY) for _ in range(10_000)]
    fork = [rng.bytes(KEY) for _ in range(100)]
    a, b = index.add_column(), index.add_column()
    index.store(a, b"".join(keys), ROOT)
    index.store(b, b"".join(keys[:5000]), ROOT)
    index.store(b, b"".join(fork), keys[4999])
    lengths = index.match(b"".join(keys))
    assert (lengths[a], lengths[b]) == (10_000, 5000)
    lengths = index.match(b"".join(keys[:5000] + fork))
    assert (lengths[a], lengths[b]) == (5000, 5100)
    index.remove(a, b"".join(keys[4096:4097]))
    assert index.match(b"".join(keys))[a] == 4096
    index.remove(a, b"".join(keys))
    index.remove(b, b"".join(keys[:5000] + fork))
    assert len(index.places) == 0 and not any(index.forest._runs)


def test_columns_grow_and_are_given_out_again() -> None:
    index = PrefixIndex()
    one = chain([1, 2, 0])
    first = [index.add_column() for _ in range(100)]
    for column in first:
        index.store(column, b"".join(one), ROOT)
    assert list(index.match(b"".join(one))[first]) == [3] * 100
    for column in first:
        index.drop(column)
    while index.tidy(7):
        pass
    assert len(index.places) == 0
    assert sorted(index.add_column() for _ in range(100)) is not None and index.width == 128


def test_loose_keys_share_their_holders_and_are_swept() -> None:
    index, rng = PrefixIndex(), np.random.default_rng(2)
    keys = split_keys(rng.bytes(KEY * 3000))
    a, b = index.add_column(), index.add_column()
    for column in (a, b):
        index.store(column, b"".join(keys), None)
    assert index.places.loose == 3000
    assert len({id(place) for places in index.places.dicts for place in places.values()}) == 1
    index.drop(a)
    index.drop(b)
    while index.tidy():
        pass
    assert len(index.places) == 0 == index.places.loose


def test_a_cycle_of_lies_ends() -> None:
    """Parents that cannot be (keys are hashes) must not hang a match."""
    index = PrefixIndex()
    a = index.add_column()
    x, y = chain([0])[0], chain([1])[0]
    index.store(a, x, y)
    index.store(a, y, x)
    index.match(x + y + x + y)
    index.match(y + x)
