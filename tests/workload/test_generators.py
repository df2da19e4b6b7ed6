"""Generators: the same by seed, at the rate and lengths that were asked for, sharing what they should and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.workload.arrivals import mean_rate
from shared.workload.generators import Chat, HotPrefix, Lengths, Unshared, chat, hot_prefix, unshared
from shared.workload.trace import BLOCK, TraceRequest, parse_trace, trace_line

Generator = Callable[[int], Iterator[TraceRequest]]

SHORT = Lengths(300, most=3000)
MAKERS: dict[str, Callable[[float, int], Iterator[TraceRequest]]] = {
    "chat": lambda rate, seed: chat(Chat(rate, 3, 5, 1000, SHORT, SHORT, SHORT, 9000), seed),
    "hot-prefix": lambda rate, seed: hot_prefix(HotPrefix(rate, 5, 2000, 1.0, SHORT, SHORT), seed),
    "unshared": lambda rate, seed: unshared(Unshared(rate, SHORT, SHORT), seed),
}
made = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def shared_tokens(requests: list[TraceRequest]) -> list[int]:
    """What an endless cache would have of each prompt. Fails where an id has two predecessors."""
    before, hits = dict[int, int](), list[int]()
    for request in requests:
        hits.append(BLOCK * sum(hash_id in before for hash_id in request.hash_ids))
        for parent, hash_id in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(hash_id, parent) == parent
    return hits


@made
@given(seed=st.integers(), rate=st.floats(0.01, 1000))
def test_a_seed_makes_one_valid_trace(
    make: Callable[[float, int], Iterator[TraceRequest]], seed: int, rate: float
) -> None:
    requests = list(islice(make(rate, seed), 60))
    assert requests == list(islice(make(rate, seed), 60))
    assert requests != list(islice(make(rate, seed + 1), 60))
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    assert len(list(parse_trace(map(trace_line, requests)))) == 60
    shared_tokens(requests)


@made
def test_the_rate_is_that_asked_for(make: Callable[[float, int], Iterator[TraceRequest]]) -> None:
    assert mean_rate(list(islice(make(7.0, 3), 6000))) == pytest.approx(7.0, rel=0.1)


def test_lengths_have_their_mean() -> None:
    requests = list(islice(unshared(Unshared(input=Lengths(500, 0.5), output=Lengths(64, 0)), 1), 5000))
    assert sum(r.input_tokens for r in requests) / 5000 == pytest.approx(500, rel=0.05)
    assert {r.output_tokens for r in requests} == {64}
    assert not any(shared_tokens(requests))


def test_turns_share_all_whole_blocks_of_the_turn_before() -> None:
    shape = Chat(1.0, 4, 5, 1000, SHORT, SHORT, SHORT, 9000)
    seen, deep = dict[tuple[int, ...], TraceRequest](), 0
    for request in islice(chat(shape, 2), 500):
        assert request.hash_ids[:1] == (0,), "the system prompt is everybody's"
        assert request.input_tokens <= shape.most_input
        whole = request.hash_ids[: request.input_tokens // BLOCK]
        former = next((seen[whole[:n]] for n in range(len(whole), 1, -1) if whole[:n] in seen), None)
        deep += former is not None
        assert former is None or request.input_tokens > former.input_tokens + former.output_tokens
        seen[whole] = request
    assert deep > 150


def test_the_first_hot_prefix_is_the_hottest() -> None:
    requests = list(islice(hot_prefix(HotPrefix(prefixes=4, prefix_tokens=1024, skew=1.0), 5), 4000))
    shares = [sum(r.hash_ids[0] == 2 * k for r in requests) / 4000 for k in range(4)]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03)
    assert all(hit == 1024 for hit in shared_tokens(requests)[200:])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Chat(rate=0),
        lambda: Chat(turns=0.5),
        lambda: Chat(system_tokens=1 << 20),
        lambda: HotPrefix(prefixes=0),
        lambda: HotPrefix(rate=float("nan")),
        lambda: Unshared(rate=-1),
        lambda: Lengths(0),
        lambda: Lengths(5, -1),
    ],
)
def test_shapes_that_cannot_be_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"rate|lengths"):
        wrong()
