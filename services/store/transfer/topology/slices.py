"""How requests become slices: neighbours are coalesced, large ones cut, nothing straddles a memory region. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

FLOOR = 16 << 10
"""The paper's granularity: nothing is cut smaller for the sake of spreading it."""
CEILING = 4 << 20
POST_SECONDS = 10e-6
POST_SHARE = 0.04
"""What posting and accounting of a slice costs, and how much of its time on the wire that may be."""


class Piece(NamedTuple):
    """One request as it is to travel: ``length`` bytes at address or offset ``local`` here and ``remote`` there.
    Only pieces of equal ``kind`` (operation, memory regions, locations, by which right) go together."""

    local: int
    remote: int
    length: int
    kind: Hashable = None


class Run(NamedTuple):
    """``pieces`` of them, from number ``first`` on, that follow each other at both ends: ``length`` bytes in one go."""

    first: int
    pieces: int
    local: int
    remote: int
    length: int


def coalesce(pieces: Sequence[Piece], most: int = CEILING) -> list[Run]:
    """Neighbours in order of submission become one run of ``most`` bytes or less. A larger piece stays alone."""
    runs: list[Run] = []
    for number, piece in enumerate(pieces):
        last = runs[-1] if runs else None
        if (
            last is not None
            and piece.local == last.local + last.length
            and piece.remote == last.remote + last.length
            and last.length + piece.length <= most
            and piece.kind == pieces[last.first].kind
        ):
            runs[-1] = last._replace(pieces=last.pieces + 1, length=last.length + piece.length)
        else:
            runs.append(Run(number, 1, piece.local, piece.remote, piece.length))
    return runs


def slice_size(length: int, queued: int, lanes: int = 1, least: int = FLOOR, most: int = CEILING) -> int:
    """Bytes to cut a request of ``length`` into when ``queued`` bytes wait already for the ``lanes`` (NICs, streams)
    that could carry it: two slices for each lane, so that a lane that is done early has more to do. The deeper the
    queue, the larger the slices, ``most`` when deep. ``least``: see :func:`worth`."""
    return max(FLOOR, min(most, max(least, (length + queued) // (2 * max(1, lanes)))))


def worth(bytes_per_second: float, post_seconds: float = POST_SECONDS, most: int = CEILING) -> int:
    """The least slice whose posting costs no more than POST_SHARE of its time on a wire of that rate; FLOOR where the
    rate is not known (0)."""
    return max(FLOOR, min(most, int(bytes_per_second * post_seconds / POST_SHARE)))


def cut(length: int, size: int, borders: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(offset, length) of the slices of [0, length), ``size`` bytes or less each (rounded up to multiples of FLOOR),
    about equal, none with one of ``borders`` (offsets, ascending; see :func:`borders_in`) in its inside."""
    edges = [0, *borders[bisect_right(borders, 0) : bisect_left(borders, length)], length]
    return [(start + at, part) for start, end in pairwise(edges) for at, part in _even(end - start, size)]


def _even(length: int, size: int) -> list[tuple[int, int]]:
    if length <= size:
        return [(0, length)] if length else []
    count = -(-length // size)
    per = -(-length // count // FLOOR) * FLOOR
    return [(at, min(per, length - at)) for at in range(0, length, per)]


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
