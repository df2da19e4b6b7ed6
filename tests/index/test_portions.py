"""What was read of the streams in one go is applied in pieces: all of it, once, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.index.mirroring import portions

entries = st.lists(st.tuples(st.integers(1, 99), st.binary(max_size=40)), max_size=20)


@given(st.dictionaries(st.integers(0, 5), entries, max_size=4), st.integers(1, 100))
def test_pieces_make_up_the_whole(read: dict[int, list[tuple[int, bytes]]], most: int) -> None:
    together: dict[int, list[tuple[int, bytes]]] = {}
    for piece in portions(read, most):
        for shard, some in piece.items():
            together.setdefault(shard, []).extend(some)
    assert {shard: all for shard, all in together.items() if all} == {shard: all for shard, all in read.items() if all}


def test_pieces_are_as_small_as_asked_where_entries_are() -> None:
    read = {0: [(id, bytes(100)) for id in range(100)], 1: [(id, bytes(100)) for id in range(10)]}
    sizes = [sum(len(e) for some in piece.values() for _, e in some) for piece in portions(read, 1000)]
    assert len(sizes) == 11 and max(sizes) <= 1200
