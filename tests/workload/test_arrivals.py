"""Arrivals: spread within their ticks and no further, in order, by seed; compressed and cut as asked."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.workload.arrivals import at_rate, compressed, cut, mean_rate, shortened, spread
from shared.workload.tokens import prompt_tokens
from shared.workload.trace import TraceRequest, blocks

ticks = st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 6)), max_size=8)


def ticked(steps: list[tuple[int, int]]) -> list[TraceRequest]:
    """For each step: so many ms later, so many requests at once; every request is another."""
    requests, now, ids = list[TraceRequest](), 0, count()
    for step, size in steps:
        now += step
        requests += [TraceRequest(now / 1000, 5, 1, (next(ids),)) for _ in range(size)]
    return requests


def arrivals(requests: Iterable[TraceRequest]) -> list[float]:
    return [request.arrival for request in requests]


@given(ticks, st.integers(0, 9))
def test_spread_stays_within_the_tick_and_keeps_the_order(steps: list[tuple[int, int]], seed: int) -> None:
    before = ticked(steps)
    after = list(spread(before, seed))
    assert [request.hash_ids for request in after] == [request.hash_ids for request in before]
    assert [request.arrival for request in after] == sorted(request.arrival for request in after)
    instants = sorted({request.arrival for request in before})
    for old, new in zip(before, after, strict=True):
        following = next((instant for instant in instants if instant > old.arrival), old.arrival + 3)
        assert old.arrival <= new.arrival <= min(following, old.arrival + 3) or new == old
    alone = [i for i, old in enumerate(before) if sum(old.arrival == other.arrival for other in before) == 1]
    assert all(after[i] == before[i] for i in alone)


@given(ticks, st.integers(0, 9))
def test_spread_is_the_same_by_seed_and_for_a_part(steps: list[tuple[int, int]], seed: int) -> None:
    whole = ticked([*steps, (3000, 4), (3000, 1)])
    assert list(spread(whole, seed)) == list(spread(iter(whole), seed))
    assert arrivals(spread(whole[:-1], seed)) == pytest.approx(arrivals(spread(whole, seed))[:-1])
    assert list(spread(whole, seed)) != list(spread(whole, seed + 1))


@given(ticks, st.floats(0.01, 100))
def test_compression_divides_time(steps: list[tuple[int, int]], factor: float) -> None:
    before = ticked(steps)
    after = list(compressed(before, factor))
    assert [r.arrival for r in after] == pytest.approx([r.arrival / factor for r in before])
    assert [r[1:] for r in after] == [r[1:] for r in before]


@given(ticks, st.floats(0.01, 100))
def test_a_rate_is_met_in_the_mean(steps: list[tuple[int, int]], rate: float) -> None:
    made = at_rate(ticked(steps), rate)
    assert mean_rate(made) == pytest.approx(rate) or len({request.arrival for request in made}) < 2


def test_cut_counts_and_looks_at_the_clock() -> None:
    requests = ticked([(1000, 2), (1000, 2), (1000, 2)])
    assert list(cut(requests)) == requests
    assert list(cut(requests, 3)) == requests[:3]
    assert list(cut(requests, duration_s=2.5)) == requests[:4]
    assert list(cut(requests, 3, 1.5)) == requests[:2]


@given(st.integers(1, 5000), st.sampled_from([1, 2, 8, 64, 512]))
def test_shortened_prompts_share_what_they_shared(tokens: int, divisor: int) -> None:
    request = TraceRequest(0.0, tokens, 7, tuple(range(blocks(tokens))))
    (short,) = shortened([request], divisor)
    made = prompt_tokens(short, block=512 // divisor)
    assert len(made) == short.input_tokens == -(-tokens // divisor) and short.output_tokens == -(-7 // divisor)


@pytest.mark.parametrize("divisor", [0, -2, 3, 1024])
def test_what_cannot_be_is_refused(divisor: int) -> None:
    with pytest.raises(ValueError, match="divide"):
        shortened([], divisor)
    with pytest.raises(ValueError, match="not positive"):
        compressed([], 0)
    with pytest.raises(ValueError, match="not positive"):
        at_rate([], float("nan"))
