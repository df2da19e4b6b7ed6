"""The table of fingerprints against a dict, and places that wait for it: through splits, spills and removals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.blocks import KEY, split_keys
from shared.index import table
from shared.index.places import Places
from shared.index.table import Table
from tests.examples import examples


def keys(rng: np.random.Generator, n: int) -> bytes:
    return rng.bytes(KEY * n)


@pytest.fixture(params=[table.LIMIT, 6000])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The second is so high that many buckets are full."""
    monkeypatch.setattr(table, "LIMIT", request.param)
    return int(request.param)


def test_table_is_a_dict(limit: int) -> None:
    rng, held, model = np.random.default_rng(limit), Table(2), dict[bytes, int]()
    for turn in range(24):
        chain = keys(rng, int(rng.choice([1, 7, 500, 3000])))
        numbers = np.arange(len(chain) // KEY) + 10_000 * turn
        held.put(chain, numbers)
        model |= dict(zip(split_keys(chain), numbers.tolist(), strict=True))
        some = [list(model)[at] for at in rng.integers(0, len(model), int(rng.choice([1, 20, 400])))]
        for key in dict.fromkeys(some[::5]):
            held.discard(key, model[key] + 1)  # it is elsewhere: stays
            held.discard(key, model.pop(key))
        some = [key for key in dict.fromkeys(some) if key in model]
        if some:
            wrong = np.array([model[key] + at % 2 for at, key in enumerate(some)])
            held.remove(b"".join(some), wrong)
            for key in some[::2]:
                del model[key]
        assert len(held) == len(model)
    assert held.find_all(b"".join(model)).tolist() == list(model.values())
    assert all(held.find(key) == number for key, number in model.items())
    absent = keys(rng, 2000)
    assert (held.find_all(absent) == -1).all() and held.find(absent[:KEY]) == -1


def test_all_keys_at_once_that_want_the_same_bucket() -> None:
    """More than it has places for, in one call: the rest is found all the same."""
    held, rng = Table(2), np.random.default_rng(1)
    candidates = split_keys(keys(rng, 20_000))
    buckets = held._buckets_of(held._prints_of(b"".join(candidates))).tolist()
    most = max(set(buckets), key=buckets.count)
    same = [key for key, bucket in zip(candidates, buckets, strict=True) if bucket == most]
    assert len(same) > table.WAYS
    held.put(b"".join(same), np.arange(len(same)))
    assert held.find_all(b"".join(same)).tolist() == [held.find(key) for key in same] == list(range(len(same)))
    held.remove(b"".join(same), np.arange(len(same)))
    assert len(held) == 0


chains = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=20)


@settings(max_examples=examples(40), deadline=None)
@given(chains, st.integers(0, 2**32))
def test_places_that_wait_are_found_like_others(sizes: list[tuple[int, bool]], seed: int) -> None:
    places, rng, model = Places(), np.random.default_rng(seed), dict[bytes, int]()
    for run, (size, flush) in enumerate(sizes):
        chain = keys(rng, size)
        places.put(chain, run << 12)
        model |= {key: run << 12 | at for at, key in enumerate(split_keys(chain))}
        if flush:
            places.flush(1)
        if run % 3 == 2:  # the end of a run is cut
            cut = size // 2
            places.remove(chain[cut * KEY :], run << 12 | cut)
            model = {key: place for key, place in model.items() if place < (run << 12 | cut)}
    assert len(places) == len(model)
    assert [places.find(key) for key in model] == places.find_all(b"".join(model)).tolist() == list(model.values())
    assert places.find(keys(rng, 1)) == -1
