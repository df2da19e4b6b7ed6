"""The cut into slices: everything once, nothing across a memory region, larger when there is more."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer.topology.slices import (
    CEILING,
    FLOOR,
    Piece,
    borders_in,
    coalesce,
    cut,
    merge_borders,
    regions,
    slice_size,
    worth,
)

sizes = st.integers(1, 3 * CEILING) | st.integers(1, 3 * FLOOR)


@given(sizes, sizes, st.lists(st.integers(-5, 3 * CEILING + 5), unique=True).map(sorted))
def test_slices_cover_a_request_once_and_straddle_no_border(length: int, size: int, borders: list[int]) -> None:
    at = 0
    for offset, part in cut(length, size, borders):
        assert offset == at
        assert 0 < part <= -(-size // FLOOR) * FLOOR
        assert not any(offset < border < offset + part for border in borders)
        at += part
    assert at == length


@given(sizes, sizes)
def test_slices_of_one_request_are_about_equal_and_not_below_the_floor(length: int, size: int) -> None:
    parts = [part for _, part in cut(length, size)]
    assert all(part == parts[0] and part % FLOOR == 0 for part in parts[:-1])
    assert len(parts) <= -(-length // size)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 16), st.integers(0, CEILING))
def test_the_cut_grows_with_request_and_queue(length: int, queued: int, lanes: int, least: int) -> None:
    size = slice_size(length, queued, lanes, least)
    assert max(FLOOR, least) <= size <= CEILING
    assert slice_size(length + FLOOR, queued, lanes, least) >= size
    assert slice_size(length, queued + FLOOR, lanes, least) >= size
    assert slice_size(length, queued, lanes + 1, least) <= max(size, FLOOR)


def test_a_deep_queue_means_slices_of_four_mebibytes() -> None:
    assert slice_size(64 << 10, 0, lanes=2) == FLOOR
    assert slice_size(64 << 10, 1 << 30, lanes=8) == CEILING == 4 << 20


def test_posting_stays_a_few_percent_of_the_time_on_the_wire() -> None:
    assert worth(0) == FLOOR
    assert worth(100e6) == 25_000
    assert worth(12.5e9) == pytest.approx(12.5e9 * 10e-6 / 0.04, rel=0.01)
    assert worth(50e9) == CEILING


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 22), st.integers(1, 1 << 20))
def test_regions_cover_a_segment_within_the_devices_limit(size: int, limit: int, align: int) -> None:
    parts = regions(size, max(limit, size // 1000), align)
    assert [offset for offset, _ in parts] == [sum(p for _, p in parts[:n]) for n in range(len(parts))]
    assert sum(part for _, part in parts) == size
    assert all(0 < part <= max(limit, size // 1000) for _, part in parts)
    if align <= limit:
        assert all(offset % align == 0 for offset, _ in parts)


def test_a_device_that_registers_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        regions(10, 0)


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 20), st.integers(1, 1 << 16), st.integers(1, 1 << 16))
def test_slices_lie_in_one_region_at_both_ends(offset: int, length: int, here: int, there: int) -> None:
    ours, theirs = 1000, 77_777  # where the request begins in either segment
    local = borders_in(ours, length, [at for at, _ in regions(1 << 21, max(here, 4096))])
    remote = borders_in(theirs, length, [at for at, _ in regions(1 << 21, max(there, 4096))])
    for at, part in cut(length, CEILING, merge_borders(local, remote)):
        for start, limit in ((ours, max(here, 4096)), (theirs, max(there, 4096))):
            assert (start + at) // limit == (start + at + part - 1) // limit


@st.composite
def submissions(draw: st.DrawFn) -> list[Piece]:
    """Pieces that often, but not always, follow each other."""
    pieces: list[Piece] = []
    for _ in range(draw(st.integers(0, 30))):
        last = pieces[-1] if pieces else Piece(0, 0, 1)
        gaps = draw(st.sampled_from([(0, 0), (0, 0), (0, 0), (7, 0), (0, 7), (-1, -1)]))
        pieces.append(
            Piece(
                last.local + last.length + gaps[0],
                last.remote + last.length + gaps[1],
                draw(st.integers(1, 100)),
                draw(st.sampled_from("aaab")),
            )
        )
    return pieces


@given(submissions(), st.integers(1, 300))
def test_neighbours_are_coalesced_and_nothing_else(pieces: list[Piece], most: int) -> None:
    runs = coalesce(pieces, most)
    assert [n for run in runs for n in range(run.first, run.first + run.pieces)] == list(range(len(pieces)))
    for run in runs:
        own = pieces[run.first : run.first + run.pieces]
        assert run.length == sum(piece.length for piece in own)
        assert run.length <= most or run.pieces == 1
        at = 0
        for piece in own:
            assert (piece.local, piece.remote, piece.kind) == (run.local + at, run.remote + at, own[0].kind)
            at += piece.length
    for run, following in pairwise(runs):
        other = pieces[following.first]
        joined = (run.local + run.length, run.remote + run.length) == (other.local, other.remote)
        assert not (joined and pieces[run.first].kind == other.kind and run.length + other.length <= most)
