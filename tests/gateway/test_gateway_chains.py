"""Remembered runs of blocks: always the keys of the published formula, in bounded memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.gateway.chains import RUN, Chains
from shared.blocks import KEY, chain_keys

ROOTS = [b"a" * KEY, b"b" * KEY]
prompts = st.tuples(st.sampled_from(ROOTS), st.lists(st.integers(0, 1), max_size=40), st.sampled_from([1, 2, 8]))


@given(st.lists(prompts, max_size=30), st.integers(0, 400))
def test_keys_are_those_of_the_formula_whatever_came_before(
    asked: list[tuple[bytes, list[int], int]], most: int
) -> None:
    chains = Chains(most)
    for root, ids, block in asked:
        tokens = np.array(ids, dtype=np.uint32)
        assert chains.keys(root, tokens, block) == chain_keys(root, tokens, block)
        assert 0 <= chains.held <= most


@given(st.integers(0, 63), st.integers(16, 63))
def test_runs_that_begin_alike_and_differ_later(first: int, second: int) -> None:
    """Within the first block, beyond what a run is found by, too."""
    chains, one = Chains(), np.zeros(64, dtype=np.uint32)
    for at in (first, second, first):
        other = one.copy()
        other[at] = 7
        for tokens in (one, other):
            assert chains.keys(ROOTS[0], tokens, 32) == chain_keys(ROOTS[0], tokens, 32)


def test_a_conversation_is_hashed_once() -> None:
    chains, rng = Chains(), np.random.default_rng(1)
    tokens = rng.integers(0, 1000, 4096, dtype=np.uint32)
    for turn in range(1, 17):
        chains.keys(ROOTS[0], tokens[: turn * 256], 32)
    keys = KEY * len(tokens) // 32
    assert chains.held == tokens.nbytes + keys + 16 * RUN  # each turn added its own blocks and no more


def test_many_short_prompts_are_bounded_by_what_they_really_take() -> None:
    chains = Chains(most_bytes=100 * RUN)
    for first in range(1000):
        chains.keys(ROOTS[0], np.full(32, first, dtype=np.uint32), 32)
    assert len(chains._runs) < 100 and chains.held <= 100 * RUN


def test_from_many_threads() -> None:
    chains, rng = Chains(1 << 16), np.random.default_rng(2)
    trunk = rng.integers(0, 1000, 1024, dtype=np.uint32)
    asked = [np.concatenate([trunk, rng.integers(0, 1000, 512, dtype=np.uint32)]) for _ in range(64)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda tokens: chains.keys(ROOTS[0], tokens, 32), asked * 4))
    assert found == [chain_keys(ROOTS[0], tokens, 32) for tokens in asked] * 4
    assert chains.held <= 1 << 16
