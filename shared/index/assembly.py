"""Putting a batch's entries, which came over several shards, together into chains again (see shared/index/entry.py)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from shared.blocks import KEY, key_count
from shared.index.entry import MOST_KEYS, NO_PARENT, Entry, unpack_heads
from shared.index.forest import ROOT, UNKNOWN

MOST_PARTIAL = 64
PATIENCE = 1.0  # seconds that an incomplete batch is remembered
_FEW = 16

Chain = tuple[bytes | None, bytes]
"""(parent, consecutive keys). Parent ROOT: a chain begins; UNKNOWN: the one before is not known; None: a single loose
key."""


_ASCENDING = struct.pack(f"<{MOST_KEYS}H", *range(1, MOST_KEYS + 1))


def single(entry: Entry) -> Chain | None:
    """The chain of an entry that is a whole batch and one chain with a known parent, as most are."""
    keys, heads = entry.keys, entry.heads
    if len(heads) != 2 + KEY or KEY * entry.total != len(keys) or heads[0] or heads[1]:
        return None
    if entry.positions != _ASCENDING[: 2 * entry.total]:
        return None
    return (ROOT if heads[2:] == NO_PARENT else heads[2:]), keys


def chains(entries: Sequence[Entry]) -> list[Chain]:
    """The chains in what has come of one batch, in the order of their positions."""
    keys = b"".join(entry.keys for entry in entries)
    positions = b"".join(entry.positions for entry in entries)
    parents: dict[int, bytes] = {}
    before = 0
    for entry in entries:
        for index, parent in unpack_heads(entry.heads):
            at = 2 * (before + index)
            parents[int.from_bytes(positions[at : at + 2], "little")] = parent
        before += key_count(entry.keys)
    if before <= _FEW:
        order, keys = _sorted_few(positions, keys)
    else:
        order, keys = _sorted_many(positions, keys)
    return list(_segments(order, keys, parents))


def _sorted_few(positions: bytes, keys: bytes) -> tuple[Sequence[int], bytes]:
    numbers = struct.unpack(f"<{len(positions) // 2}H", positions)
    if all(a < b for a, b in pairwise(numbers)):
        return numbers, keys
    rows = sorted((number, keys[at * KEY : at * KEY + KEY]) for at, number in enumerate(numbers))
    return [number for number, _ in rows], b"".join(key for _, key in rows)


def _sorted_many(positions: bytes, keys: bytes) -> tuple[Sequence[int], bytes]:
    numbers = np.frombuffer(positions, dtype="<u2")
    order = np.argsort(numbers, kind="stable")
    rows = np.frombuffer(keys, dtype=f"V{KEY}")
    ranked: list[int] = numbers[order].tolist()
    return ranked, rows[order].tobytes()


def _segments(order: Sequence[int], keys: bytes, parents: dict[int, bytes]) -> Iterable[Chain]:
    begin = 0
    for end in _ends(order, parents):
        parent = parents.get(order[begin])
        chain = keys[begin * KEY : end * KEY]
        if parent is None:  # the one before is missing or was not known
            yield (None if end - begin == 1 else UNKNOWN), chain
        else:
            yield (ROOT if parent == NO_PARENT else parent), chain
        begin = end


def _ends(order: Sequence[int], parents: dict[int, bytes]) -> Iterable[int]:
    """Where segments end: before a gap, before a head, and at the end."""
    if order and order[-1] - order[0] == len(order) - 1 and not parents.keys() - {order[0]}:
        yield len(order)
        return
    for at in range(1, len(order)):
        if order[at] != order[at - 1] + 1 or order[at] in parents:
            yield at
    if order:
        yield len(order)


class Partials:
    """Batches of which something is still missing. What came is in the index already; completing only connects it."""

    def __init__(self) -> None:
        self._held: dict[tuple[bytes, int], tuple[float, list[Entry]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, entries: Sequence[Entry], now: float) -> list[Chain]:
        """``entries``: of one batch. Its chains, when this completes a batch that came in several rounds."""
        first = entries[0]
        name = (first.code, first.batch)
        since, before = self._held.pop(name, (now, []))
        together = [*before, *entries]
        if sum(key_count(entry.keys) for entry in together) < first.total:
            self._held[name] = (since, together)
            self._expire(now)
            return []
        return chains(together) if before else []

    def _expire(self, now: float) -> None:
        while self._held:
            name, (since, _) = next(iter(self._held.items()))
            if len(self._held) <= MOST_PARTIAL and now - since <= PATIENCE:
                return
            del self._held[name]
