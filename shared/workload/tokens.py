"""Token ids made from the ids of a trace's blocks: the same id gives the same tokens, in every process and run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.workload.trace import BLOCK, TraceRequest

Ids = npt.NDArray[np.uint32]
_Words = npt.NDArray[np.uint64]


class Vocabulary(NamedTuple):
    """Token ids that are drawn: ``low`` up to, not including, ``high``. The default lies within every model with 32,000
    entries or more, and clear of the special ones at the beginning."""

    low: int = 1000
    high: int = 30_000


ANY = Vocabulary()


def prompt_tokens(request: TraceRequest, vocabulary: Vocabulary = ANY, block: int = BLOCK, salt: int = 0) -> Ids:
    """The prompt, ``(input_tokens,)``: for each id in turn its ``block`` tokens, the last block cut off.

    Another ``salt`` makes other tokens of the same ids: a second replay then finds nothing of the first in any cache.
    Raises ValueError for an empty vocabulary, or where the ids do not fit the prompt's length.
    """
    if not 0 <= vocabulary.low < vocabulary.high <= 1 << 32:
        raise ValueError(f"no token ids lie in {vocabulary.low}:{vocabulary.high}")
    if len(request.hash_ids) != -(-request.input_tokens // block):
        raise ValueError(f"{len(request.hash_ids)} ids, {request.input_tokens} tokens in blocks of {block}")
    ids = np.array(request.hash_ids, dtype=np.uint64)[:, None]
    seed = _mixed(np.array([salt % (1 << 64)], dtype=np.uint64))
    words = _mixed(_mixed(ids ^ seed) + np.arange(block, dtype=np.uint64))
    span = np.uint64(vocabulary.high - vocabulary.low)
    drawn = (words % span).astype(np.uint32) + np.uint32(vocabulary.low)
    return drawn.ravel()[: request.input_tokens]


def _mixed(words: _Words) -> _Words:
    """The finalizer of splitmix64: neighbours become unrelated."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
