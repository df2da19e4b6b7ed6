"""The cut into slices: everything once, nothing across a memory region, larger when there is more."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer.topology.slices import (
    SLICE_CEILING,
    SLICE_FLOOR,
    borders_in,
    cut,
    merge_borders,
    regions,
    slice_size,
)

sizes = st.integers(1, 3 * SLICE_CEILING) | st.integers(1, 3 * SLICE_FLOOR)


@given(sizes, sizes, st.lists(st.integers(-5, 3 * SLICE_CEILING + 5), unique=True, max_size=20).map(sorted))
def test_slices_cover_a_request_once_and_straddle_no_border(length: int, size: int, borders: list[int]) -> None:
    at = 0
    for offset, part in cut(length, size, borders=borders):
        assert offset == at
        assert 0 < part <= -(-size // SLICE_FLOOR) * SLICE_FLOOR
        assert not any(offset < border < offset + part for border in borders)
        at += part
    assert at == length


@given(sizes, sizes)
def test_slices_of_one_request_are_about_equal_and_not_below_the_floor(length: int, size: int) -> None:
    parts = [part for _, part in cut(length, size)]
    assert all(part == parts[0] and part % SLICE_FLOOR == 0 for part in parts[:-1])
    assert len(parts) <= -(-length // size)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(2, 16), st.integers(0, SLICE_CEILING))
def test_the_cut_grows_with_request_and_queue(length: int, queued: int, lanes: int, least: int) -> None:
    size = slice_size(length, queued, lanes, least)
    assert max(SLICE_FLOOR, least) <= size <= SLICE_CEILING
    assert slice_size(length + SLICE_FLOOR, queued, lanes, least) >= size
    assert slice_size(length, queued + SLICE_FLOOR, lanes, least) >= size
    assert slice_size(length, queued, lanes + 1, least) <= size


def test_a_deep_queue_means_slices_of_four_mebibytes() -> None:
    assert slice_size(64 << 10, 0, lanes=2, least=0) == SLICE_FLOOR == 16 << 10
    assert slice_size(64 << 10, 1 << 30, lanes=8) == SLICE_CEILING == 4 << 20
    assert slice_size(1 << 30, 0, lanes=1) == SLICE_CEILING  # nothing to spread it over


@given(
    st.integers(1, 5000),
    st.integers(2, 100),
    sizes,
    st.lists(st.integers(1, 500_000), unique=True, max_size=20).map(sorted),
)
def test_a_run_is_cut_between_its_requests_and_at_borders(step: int, count: int, size: int, borders: list[int]) -> None:
    whole = cut(step * count, size, step)
    assert all(at % step == 0 and part % step == 0 for at, part in whole)
    edges = {at for at, _ in cut(step * count, size, step, borders)}
    assert edges == {at for at, _ in whole} | {border for border in borders if border < step * count}


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 22), st.integers(1, 1 << 20))
def test_regions_cover_a_segment_within_the_devices_limit(size: int, limit: int, align: int) -> None:
    parts = regions(size, max(limit, size // 100), align)
    assert [offset for offset, _ in parts] == [0, *accumulate(part for _, part in parts)][:-1]
    assert sum(part for _, part in parts) == size
    assert all(0 < part <= max(limit, size // 100) for _, part in parts)
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
    for at, part in cut(length, SLICE_CEILING, borders=merge_borders(local, remote)):
        for start, limit in ((ours, max(here, 4096)), (theirs, max(there, 4096))):
            assert (start + at) // limit == (start + at + part - 1) // limit
