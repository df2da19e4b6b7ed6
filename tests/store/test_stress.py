"""The stress program: that its checks see what they are for, and a short run of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stress.board import Board, Count
from benchmarks.stress.content import LEAST, Mismatch, check, content, key_of
from benchmarks.stress.fleet import Options
from benchmarks.stress.run import stress

MOST = 4096
KEY = key_of("test", 1)


@given(st.integers(1, 1 << 60), st.booleans())
def test_what_was_stored_is_what_is_expected(generation: int, whole: bool) -> None:
    data = content(KEY, generation, MOST, whole)
    assert LEAST <= len(data) <= MOST and (len(data) == MOST) >= whole
    assert check(KEY, data, MOST, whole=whole) == generation


@given(st.data())
def test_any_other_byte_shows(data: st.DataObject) -> None:
    good = bytearray(content(KEY, 7, MOST))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Mismatch):
        check(KEY, bytes(good), MOST, lambda generation: generation == 7)


@given(st.integers(1, MOST - 1))
def test_torn_blocks_show(cut: int) -> None:
    old, new = content(KEY, 7, MOST, whole=True), content(KEY, 8, MOST, whole=True)
    torn = new[:cut] + old[cut:]
    if torn not in (old, new):
        with pytest.raises(Mismatch):
            check(KEY, torn, MOST, whole=True)


def test_the_block_of_another_key_and_a_generation_of_nobody_show() -> None:
    with pytest.raises(Mismatch, match="the block of"):
        check(KEY, content(key_of("test", 2), 7, MOST), MOST)
    with pytest.raises(Mismatch, match="nobody has written"):
        check(KEY, content(KEY, 7, MOST), MOST, lambda generation: generation < 7)
    with pytest.raises(Mismatch, match="bytes"):
        check(KEY, content(KEY, 7, MOST)[:-1], MOST)


def test_the_board_is_shared_and_outlives_its_writers(tmp_path: Path) -> None:
    one, two = Board(tmp_path / "board", 2, 4), Board(tmp_path / "board", 2, 4)
    one.add(3, Count.OPS, 5)
    generation = one.next_generation(1, 2)
    assert two.total(Count.OPS) == two.of(3, Count.OPS) == 5
    assert two.issued(2, generation) and not two.issued(2, generation + 2) and not two.issued(1, generation)


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ssd", [False, True])
def test_bytes_are_right_under_kills_and_nothing_is_left(ssd: bool) -> None:
    options = Options(agents=2, writers=1, readers=1, holders=1, evictors=1, landers=1, keys=200, slots=32, ssd=ssd)
    outcome = stress(options, seconds=4.0, interval=0.5)
    assert outcome.good, outcome
    assert outcome.faults and outcome.bytes > 0
