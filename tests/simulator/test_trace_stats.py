"""Exact facts of the paper and of its traces."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.workload.trace import TraceRequest, read_trace
from simulator.cost import A800_NODE, H800_NODE, LLAMA3_70B
from simulator.trace_stats import hit_by_token, trace_stats

TRACES = Path(__file__).parents[3] / "shared" / "traces"
SYNTHETIC = TRACES / "synthetic_trace.jsonl"

LRU = {
    20: 0.0019,
    200: 0.0178,
    1000: 0.0857,
    2000: 0.1492,
    5859: 0.3151,
    10_000: 0.4318,
    30_000: 0.6356,
    math.inf: 0.6512,
}
"""Blocks -> hit by token of the synthetic trace."""


def test_the_papers_arithmetic() -> None:
    assert LLAMA3_70B.bytes_per_token == 327_680
    assert LLAMA3_70B.break_even(8192, A800_NODE) == pytest.approx(5.86e9, rel=1e-3)
    assert LLAMA3_70B.break_even(8192, H800_NODE) == pytest.approx(18.57e9, rel=1e-3)
    assert LLAMA3_70B.flops(131_072) / A800_NODE == pytest.approx(24.25, rel=1e-2)


@pytest.mark.skipif(not SYNTHETIC.exists(), reason="the published trace is not here")
def test_the_synthetic_trace() -> None:
    stats = trace_stats(list(read_trace(SYNTHETIC)), [1000, math.inf])
    assert stats.requests == 3993
    assert (round(stats.input_mean), round(stats.output_mean), stats.input_max) == (15_325, 149, 191_378)
    assert stats.lru == {size: pytest.approx(LRU[size], abs=0.002) for size in (1000, math.inf)}


def chains(prompts: list[list[int]]) -> list[TraceRequest]:
    """Prompts that share what they begin with: the id of a block stands for all before it."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        TraceRequest(
            float(at),
            512 * len(words),
            1,
            tuple(ids.setdefault(tuple(words[: n + 1]), len(ids)) for n in range(len(words))),
        )
        for at, words in enumerate(prompts)
    ]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30))
def test_a_larger_cache_never_finds_less(prompts: list[list[int]]) -> None:
    requests = chains(prompts)
    curve = [hit_by_token(requests, size) for size in (1, 2, 5, 10, math.inf)]
    assert curve == sorted(curve)
    assert curve[0] >= 0 and curve[-1] < 1
    seen: set[int] = set()
    known = 0
    for request in requests:
        known += sum(block in seen for block in request.hash_ids)
        seen |= set(request.hash_ids)
    assert curve[-1] == pytest.approx(known / sum(len(one.hash_ids) for one in requests))


def test_an_empty_trace_says_so() -> None:
    with pytest.raises(ValueError, match="empty"):
        trace_stats([], [math.inf])
