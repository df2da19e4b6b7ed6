"""Key -> number for millions of keys in numpy: fingerprints in buckets, many at a time; grows without a long pause.

Extendible hashing: a *segment* has :data:`BUCKETS` buckets of :data:`WAYS` places. One that is almost half full is
split, and fingerprints keep bucket and place: a copy, no hashing anew. What finds its bucket full goes to a dict.
Fingerprints have 63 bits, secret to the process; whoever asks compares the key itself where that matters.
"""

from __future__ import annotations

import mmap
import secrets
import struct

import numpy as np
import numpy.typing as npt

WAYS, BUCKETS = 1 << 3, 1 << 10
SEGMENT = WAYS * BUCKETS
ROW = 2 * WAYS
"""Words of a bucket: its fingerprints, then their numbers, so that both are on one page."""

LIMIT = 7 * SEGMENT // 16
"""Keys of a segment from which on it is split: then one key in two hundred finds its bucket full."""

SPLITS = 4
"""At most in one call, for they take turns of the loop; a fuller segment only works a little more."""

FIRST = 1024
"""Segments for which address space is reserved at first; memory is taken as they are used."""

_ALL = (1 << 64) - 1
_WORDS = struct.Struct("<QQ")
_WAY = np.uint64(11)  # bits of a fingerprint that do not choose its bucket: where it is put if that place is free
_ROW = struct.Struct(f"={WAYS}Q")

Prints = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def _space(segments: int) -> mmap.mmap:
    """Zeros for two words in each place; memory is taken as they are touched. (In large pages that can take 7 ms.)"""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, 8 * ROW * BUCKETS * segments, flags=flags)


class Table:
    """Numbers are >= 0. A key must not be put twice. Not thread-safe."""

    def __init__(self, segments: int = FIRST) -> None:
        self._one, self._two = secrets.randbits(63) | 1, secrets.randbits(63) & ~1
        self._factors = np.array([self._one, self._two], dtype=np.uint64)
        self._bits = 1  # of the directory
        self._shift = np.uint64(63)
        self._directory: Numbers = np.array([0, 1], dtype=np.int64)
        self._segments: list[int] = [0, 1]  # the directory, for one key
        self._depth = [1, 1]  # by segment
        self._of = [0, 1]  # by segment: the bits that lead to it
        self._spilled: dict[int, int] = {}  # by fingerprint
        self._reserve(max(2, segments))

    def _reserve(self, segments: int) -> None:
        self._flat: Prints = np.frombuffer(_space(segments), dtype=np.uint64)
        self._held: Numbers = np.zeros(segments, dtype=np.int64)
        self._prints: Prints = self._flat.reshape(-1, 2 * WAYS)[:, :WAYS]
        self._numbers: Numbers = self._flat.view(np.int64)
        self._bytes = self._flat.data.cast("B")
        self._words: memoryview[int] = self._numbers.data

    def __len__(self) -> int:
        return int(self._held.sum()) + len(self._spilled)

    # -- one key --------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """-1: not there, as far as fingerprints tell."""
        a, b = _WORDS.unpack(key)
        print = (a * self._one + b * self._two) & _ALL | 1
        at = (self._segments[print >> 64 - self._bits] * BUCKETS + (print >> 1 & BUCKETS - 1)) * ROW
        row = _ROW.unpack_from(self._bytes, 8 * at)
        if print in row:
            number: int = self._words[at + WAYS + row.index(print)]
            return number
        return self._spilled.get(print, -1) if self._spilled else -1

    def discard(self, key: bytes, number: int) -> None:
        """``key``, if it has this number."""
        a, b = _WORDS.unpack(key)
        print = (a * self._one + b * self._two) & _ALL | 1
        segment = self._segments[print >> 64 - self._bits]
        at = (segment * BUCKETS + (print >> 1 & BUCKETS - 1)) * ROW
        row = _ROW.unpack_from(self._bytes, 8 * at)
        if print not in row:
            if self._spilled.get(print) == number:
                del self._spilled[print]
        elif self._words[at + WAYS + row.index(print)] == number:
            self._flat[at + row.index(print)] = 0
            self._held[segment] -= 1

    # -- many -----------------------------------------------------------------------------------------------

    def find_all(self, keys: bytes) -> Numbers:
        """Of each key the number, -1 where it is not there."""
        prints = self._prints_of(keys)
        at, there = self._lookup(prints)
        out: Numbers = np.where(there, self._numbers.take(at + WAYS), -1)
        if self._spilled:
            for missing in (~there).nonzero()[0].tolist():
                out[missing] = self._spilled.get(int(prints[missing]), -1)
        return out

    def put(self, keys: bytes, numbers: Numbers) -> None:
        """None of the keys is there."""
        prints = self._prints_of(keys)
        buckets = self._buckets_of(prints)
        self._count(buckets, 1)
        at = (buckets << 4) + ((prints >> _WAY).view(np.int64) & WAYS - 1)
        while True:
            there = self._flat.take(at)
            self._flat[at] = np.where(there == 0, prints, there)
            mine = self._flat.take(at) == prints  # of several that found the same place free one has it
            if mine.all():
                self._numbers[at + WAYS] = numbers
                break
            done, rest = mine.nonzero()[0], (~mine).nonzero()[0]
            self._numbers[at.take(done) + WAYS] = numbers.take(done)
            prints, numbers, buckets = prints.take(rest), numbers.take(rest), buckets.take(rest)
            free = self._prints[buckets] == 0
            full = ~free.any(axis=1)
            if full.any():
                self._spill(prints[full], numbers[full], buckets[full])
                prints, numbers, buckets, free = prints[~full], numbers[~full], buckets[~full], free[~full]
            at = (buckets << 4) + free.argmax(axis=1)
        self._relieve()

    def remove(self, keys: bytes, numbers: Numbers) -> None:
        """Those of the keys that have these numbers."""
        prints = self._prints_of(keys)
        at, there = self._lookup(prints)
        there &= self._numbers.take(at + WAYS) == numbers
        self._flat[at[there]] = 0
        self._count(at[there] >> 4, -1)
        for missing in (~there).nonzero()[0].tolist():
            if self._spilled.get(int(prints[missing])) == numbers[missing]:
                del self._spilled[int(prints[missing])]

    def _prints_of(self, keys: bytes) -> Prints:
        words = np.frombuffer(keys, dtype=np.uint64)
        prints: Prints = words[::2] * self._factors[0]
        prints += words[1::2] * self._factors[1]
        prints |= np.uint64(1)
        return prints

    def _buckets_of(self, prints: Prints) -> Numbers:
        buckets: Numbers = self._directory.take((prints >> self._shift).view(np.int64))
        buckets <<= 10
        buckets += (prints >> np.uint64(1)).view(np.int64) & (BUCKETS - 1)
        return buckets

    def _lookup(self, prints: Prints) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """(place, whether it is this fingerprint's)."""
        buckets = self._buckets_of(prints)
        key, way = (self._prints[buckets] == prints[:, None]).nonzero()
        at: Numbers = buckets << 4
        at[key] += way
        there = np.zeros(len(prints), dtype=np.bool_)
        there[key] = True
        return at, there

    def _spill(self, prints: Prints, numbers: Numbers, buckets: Numbers) -> None:
        self._spilled.update(zip(prints.tolist(), numbers.tolist(), strict=True))
        self._count(buckets, -1)

    def _count(self, buckets: Numbers, sign: int) -> None:
        held = np.bincount(buckets >> 10, minlength=1)
        self._held[: len(held)] += sign * held

    # -- growing --------------------------------------------------------------------------------------------

    def _relieve(self) -> None:
        held = self._held[: len(self._depth)]
        if held[held.argmax()] > LIMIT:
            for segment in (held > LIMIT).nonzero()[0][:SPLITS].tolist():
                self._split(segment)

    def _split(self, segment: int) -> None:
        """Those whose next bit is 1 go to a new segment, each to the same bucket and place."""
        if self._depth[segment] == self._bits:
            self._directory = np.repeat(self._directory, 2)
            self._bits += 1
            self._shift = np.uint64(64 - self._bits)
        depth, new = self._depth[segment] + 1, len(self._depth)
        if new == len(self._held):
            self._double()
        old = self._flat[segment * BUCKETS * ROW : (segment + 1) * BUCKETS * ROW].reshape(-1, ROW)
        there = self._flat[new * BUCKETS * ROW : (new + 1) * BUCKETS * ROW].reshape(-1, ROW)
        prints = old[:, :WAYS]
        moved = prints * ((prints >> np.uint64(64 - depth)) & np.uint64(1))
        there[:, WAYS:] = old[:, WAYS:]
        there[:, :WAYS] = moved
        prints -= moved
        self._held[new] = np.count_nonzero(moved)
        self._held[segment] -= self._held[new]
        self._depth[segment] = depth
        self._depth.append(depth)
        self._of[segment] *= 2
        self._of.append(self._of[segment] + 1)
        width = 1 << self._bits - depth
        self._directory[self._of[new] * width : (self._of[new] + 1) * width] = new
        self._segments = self._directory.tolist()

    def _double(self) -> None:
        """Out of address space: the one time that everything is copied, a few milliseconds for each million of keys."""
        flat, held = self._flat, self._held
        self._reserve(2 * len(held))
        self._flat[: len(flat)] = flat
        self._held[: len(held)] = held
