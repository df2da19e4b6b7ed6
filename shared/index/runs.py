"""Runs: consecutive keys of the block tree, and what one column holds of a run, as one int.

``v >= 0``: the first v blocks. ``v < 0``: there are holes, ``~v`` is the bitmap. A prefix is by far the most common.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy.typing as npt

from shared.blocks import KEY

SHIFT = 12  # a place is run id << SHIFT | position
MOST_RUN = 1 << SHIFT


@cache
def _splitter(n: int) -> struct.Struct:
    return struct.Struct(f"{KEY}s" * n)


def keys_of(chain: bytes) -> tuple[bytes, ...]:
    """The keys of a chain, quickly."""
    return _splitter(len(chain) // KEY).unpack(chain)


class Run:
    """``keys`` follow each other. The first follows key ``at - 1`` of ``parent``; where parent is None it begins a
    chain or its parent is not known: then ``doubt`` is a key that a chain can have before this run's others, though
    they have their places (the parent's name, or else the run's first key). ``forks``: runs whose parent this is.
    ``who``: bitmap of columns that hold any. ``vector``: per column the blocks it holds of the chain down to the end
    of this run, without a hole, where it has been worth keeping one; ``base``: blocks of that chain before this run;
    ``kids``: forks with a vector, which rest on this one, the last one of them after ``reach`` blocks."""

    __slots__ = ("at", "base", "doubt", "forks", "id", "keys", "kids", "parent", "reach", "vector", "who")

    def __init__(self, id: int, parent: Run | None, at: int) -> None:
        self.id = id
        self.keys = bytearray()
        self.parent = parent
        self.at = at
        self.doubt = b""
        self.forks = 0
        self.who = 0
        self.vector: npt.NDArray[Any] | None = None
        self.base = 0
        self.kids: set[Run] | None = None
        self.reach = 0

    def __len__(self) -> int:
        return len(self.keys) // KEY

    def key(self, position: int) -> bytes:
        return bytes(self.keys[position * KEY : position * KEY + KEY])

    def common(self, at: int, chain: bytes, begin: int = 0) -> int:
        """How many keys of ``chain`` from ``begin`` on are here from ``at`` on."""
        size = len(chain) // KEY - begin
        rest = memoryview(chain)[begin * KEY :]
        if self.keys.startswith(rest, at * KEY):
            return size
        low, high = 0, min(len(self.keys) // KEY - at, size) + 1
        while high - low > 1:
            mid = (low + high) // 2
            if self.keys.startswith(rest[low * KEY : mid * KEY], (at + low) * KEY):
                low = mid
            else:
                high = mid
        return low

    def follows(self, other: Run) -> bool:
        """This run is ``other`` or descends from it."""
        run: Run | None = self
        while run is not None:
            if run is other:
                return True
            run = run.parent
        return False


def bitmap(v: int) -> int:
    return (1 << v) - 1 if v >= 0 else ~v


def packed(mask: int) -> int:
    return ~mask if mask & (mask + 1) else mask.bit_length()


def prefix(v: int) -> int:
    """Blocks from the start without a hole."""
    return v if v >= 0 else (v & -v).bit_length() - 1


def last(v: int) -> int:
    """Blocks up to and with the last one held."""
    return v if v >= 0 else (~v).bit_length()


def ones(mask: int) -> Iterator[int]:
    """Positions of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
