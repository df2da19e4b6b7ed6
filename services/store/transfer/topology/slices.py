"""The cut of requests into slices, of segments into memory regions, and no slice across the end of a region. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

SLICE_FLOOR = 16 << 10
"""The paper's granularity: nothing is cut smaller for the sake of spreading it."""
SLICE_CEILING = 4 << 20
RUN = 1 << 14
"""Requests of a run that one slice carries at most: each of them is answered for."""
SPREAD = 2 << 20
"""A lane gets slices worth their round trip, or none."""


def slice_size(length: int, queued: int, lanes: int, least: int = SPREAD) -> int:
    """Bytes to cut a request of ``length`` into when ``queued`` bytes wait already for ``lanes`` NICs or streams.

    Two slices for each lane, so that one that is done early has more to do, but none below ``least``; the deeper the
    queue, the larger the slices, up to the ceiling. One lane alone gains nothing by a cut.
    """
    if lanes <= 1:
        return SLICE_CEILING
    return max(SLICE_FLOOR, min(SLICE_CEILING, max(least, (length + queued) // (2 * lanes))))


def cut(length: int, size: int, step: int = 0, borders: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(offset, length) of the slices of ``length`` bytes, about ``size`` bytes or less each: of one request about equal
    and on multiples of the floor, of a run (requests of ``step`` < ``length`` bytes) whole requests.

    None has one of ``borders`` (offsets, ascending: see :func:`borders_in`) in its inside; a border that is inside a
    request of a run cuts that request.
    """
    if 0 < step < length:
        per = max(1, min(size // step, RUN)) * step
    elif length > size:
        per = -(-length // -(-length // size) // SLICE_FLOOR) * SLICE_FLOOR
    else:
        per = max(1, length)
    slices = [(at, min(per, length - at)) for at in range(0, length, per)]
    return [part for at, piece in slices for part in _split(at, piece, borders)] if borders else slices


def _split(at: int, length: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    inside = borders[bisect_right(borders, at) : bisect_left(borders, at + length)]
    return [(start, end - start) for start, end in pairwise((at, *inside, at + length))]


def borders_in(offset: int, length: int, starts: Sequence[int]) -> list[int]:
    """Where the memory regions that begin at ``starts`` (ascending) meet inside [offset, offset + length), counted
    from ``offset``."""
    inside = starts[bisect_right(starts, offset) : bisect_left(starts, offset + length)]
    return [start - offset for start in inside]


def merge_borders(*borders: Sequence[int]) -> list[int]:
    """Those of both ends together."""
    return sorted({border for some in borders for border in some})


def regions(size: int, limit: int, align: int = 1) -> list[tuple[int, int]]:
    """(offset, length) of the memory regions of a segment of ``size`` bytes: as few as a device takes that registers
    ``limit`` bytes at most, on multiples of ``align`` (the slot's stride, so that no slot straddles one) where
    ``limit`` is not less than that."""
    per = limit // align * align if 1 < align <= limit else limit
    if per <= 0:
        raise ValueError(f"a memory region has at least one byte, not {limit}")
    return [(at, min(per, size - at)) for at in range(0, size, per)]
