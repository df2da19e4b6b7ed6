"""What is computed, in which chunks, whatever was cached."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.plan import Await, Block, Chunk, next_step, repeats_last

R, N, A = Block.READY, Block.OURS, Block.AWAITED


def walk(blocks: list[Block], tokens: int, size: int, limit: int) -> list[Chunk]:
    """All chunks, when every awaited block becomes ready as soon as it is waited for."""
    done, chunks = 0, list[Chunk]()
    while step := next_step(blocks, done, tokens, size, limit):
        if isinstance(step, Await):
            blocks[step.block] = Block.READY
        else:
            chunks.append(step)
            done = step.stop
    return chunks


def spans(blocks: list[Block], tokens: int, size: int = 4, limit: int = 8) -> list[tuple[int, int]]:
    return [(c.start, c.stop) for c in walk(blocks, tokens, size, limit)]


def test_cold() -> None:
    assert spans([N] * 5, 18) == [(0, 8), (8, 16), (16, 18)]
    assert spans([N], 3) == [(0, 3)]


def test_warm_prefix() -> None:
    assert spans([R, R, N], 10) == [(8, 10)]
    assert spans([R, R, N], 12) == [(8, 12)]


def test_everything_cached_repeats_the_last_token() -> None:
    assert spans([R, R], 8) == [(7, 8)]
    assert spans([R, N, R], 12) == [(4, 8), (11, 12)]


def test_holes() -> None:
    assert spans([N, R, N, R, N], 18) == [(0, 4), (8, 12), (16, 18)]


def test_waits_when_it_must_and_not_before() -> None:
    assert next_step([N, A, N], 0, 12, 4, 8) == Chunk(0, 4)
    assert next_step([N, A, N], 4, 12, 4, 8) == Await(1)
    assert spans([A, A], 8) == [(7, 8)]


def test_a_chunk_is_never_less_than_a_block() -> None:
    assert spans([N, N], 8, limit=1) == [(0, 4), (4, 8)]


def test_blocks_of_a_chunk() -> None:
    assert list(Chunk(4, 10).blocks(4)) == [1, 2]
    assert list(Chunk(4, 10).filled(4)) == [1]
    assert list(Chunk(7, 8).blocks(4)) == [1]


@given(data=st.data(), tokens=st.integers(1, 60), size=st.integers(1, 9), limit=st.integers(1, 20))
def test_every_token_is_there_when_it_is_needed(data: st.DataObject, tokens: int, size: int, limit: int) -> None:
    count = -(-tokens // size)
    blocks = data.draw(st.lists(st.sampled_from([R, N, A]), min_size=count, max_size=count))
    if tokens % size:
        blocks[-1] = N
    fully = all(b is not N for b in blocks)
    chunks = walk(list(blocks), tokens, size, limit)
    there = {t for t in range(tokens) if blocks[t // size] is not N}
    for chunk in chunks:
        assert set(range(chunk.start)) <= there  # everything before it
        assert chunk.tokens <= max(limit, size)
        there |= set(range(chunk.start, chunk.stop))
    assert there == set(range(tokens))
    assert chunks[-1].stop == tokens
    computed = sum(c.tokens for c in chunks)
    ours = sum(1 for t in range(tokens) if blocks[t // size] is N)
    assert computed == ours + (1 if fully or repeats_last([R if b is A else b for b in blocks], tokens, size) else 0)
