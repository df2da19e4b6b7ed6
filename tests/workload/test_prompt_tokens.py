"""Token ids from block ids: equal ids are equal tokens, others are not, everywhere and for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.workload.tokens import Vocabulary, prompt_tokens
from shared.workload.trace import BLOCK, TraceRequest, blocks


def request(tokens: int, *ids: int) -> TraceRequest:
    return TraceRequest(0.0, tokens, 1, ids)


@given(st.integers(1, 4 * BLOCK), st.lists(st.integers(0, 1 << 62), min_size=4, max_size=4, unique=True))
def test_every_block_is_that_of_its_id(tokens: int, ids: list[int]) -> None:
    ids = ids[: blocks(tokens)]
    made = prompt_tokens(request(tokens, *ids))
    assert made.shape == (tokens,) and made.dtype == np.uint32
    for place, hash_id in enumerate(ids):
        there = made[place * BLOCK : (place + 1) * BLOCK]
        assert (there == prompt_tokens(request(BLOCK, hash_id))[: len(there)]).all()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.integers(1, 200_000))
def test_tokens_lie_in_the_vocabulary(hash_id: int, low: int, size: int) -> None:
    made = prompt_tokens(request(BLOCK, hash_id), Vocabulary(low, low + size))
    assert low <= made.min() and made.max() < low + size


@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=20, unique=True))
def test_other_ids_and_other_salts_are_other_tokens(ids: list[int]) -> None:
    made = {prompt_tokens(request(BLOCK, hash_id), salt=salt).tobytes() for hash_id in ids for salt in (0, 1, -1)}
    assert len(made) == 3 * len(ids)
    starts = {tuple(prompt_tokens(request(16, hash_id), block=16)) for hash_id in ids}
    assert len(starts) == len(ids), "they differ from their first tokens on"


def test_the_tokens_of_an_id_never_change() -> None:
    """Two versions of the load generator must fill caches alike."""
    assert prompt_tokens(request(4, 46)).tolist() == KNOWN


KNOWN = [16635, 14513, 23775, 29301]


def test_all_tokens_of_the_vocabulary_are_used() -> None:
    made = prompt_tokens(request(BLOCK, 3), Vocabulary(5, 21))
    assert set(made.tolist()) == set(range(5, 21))


@pytest.mark.parametrize("vocabulary", [Vocabulary(5, 5), Vocabulary(-1, 5), Vocabulary(0, (1 << 32) + 1)])
def test_no_vocabulary_no_tokens(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="no token ids"):
        prompt_tokens(request(1, 1), vocabulary)


def test_ids_must_fit_the_prompt() -> None:
    with pytest.raises(ValueError, match="blocks of 64"):
        prompt_tokens(request(65, 1), block=64)
