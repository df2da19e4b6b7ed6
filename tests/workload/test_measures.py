"""Percentiles, TBT as the paper has it, and the hits that an endless cache would have."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.workload.measures import endless_hits, quantile, summary, worst_tenth
from shared.workload.trace import TraceRequest, read_trace

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


@given(values)
def test_tbt_is_the_mean_of_the_worst_tenth(intervals: list[float]) -> None:
    tbt = worst_tenth(intervals)
    worst = sorted(intervals, reverse=True)[: -(-len(intervals) // 10)]
    assert tbt == pytest.approx(sum(worst) / len(worst))


def test_one_token_has_no_tbt() -> None:
    assert worst_tenth([]) is None
    assert worst_tenth([1.0] * 9 + [5.0]) == 5.0
    assert worst_tenth([1.0] * 10 + [5.0]) == 3.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_quantiles_are_those_of_the_standard_library(some: list[float]) -> None:
    ordered = sorted(some)
    cuts = statistics.quantiles(ordered, n=10, method="inclusive")
    assert [quantile(ordered, k / 10) for k in range(1, 10)] == pytest.approx(cuts, abs=1e-6)
    assert (quantile(ordered, 0), quantile(ordered, 1)) == (ordered[0], ordered[-1])


def test_a_summary_names_what_it_says() -> None:
    assert summary("ttft", [3.0, 1.0, 2.0]) == {
        "ttft_mean_s": 2.0,
        "ttft_p50_s": 2.0,
        "ttft_p90_s": pytest.approx(2.8),
        "ttft_p99_s": pytest.approx(2.98),
    }
    assert set(summary("tbt", []).values()) == {None}
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_hits_of_an_endless_cache() -> None:
    first = TraceRequest(0, 1000, 1, (0, 1))
    assert endless_hits([]) == endless_hits([first]) == 0
    assert endless_hits([first, first]) == 0.5, "a partial block counts by its tokens"
    assert endless_hits([first, TraceRequest(1, 1000, 1, (2, 1))]) == 0, "a prefix begins at the beginning"
    assert endless_hits([first, TraceRequest(1, 1000, 1, (0, 3))]) == 512 / 2000


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not here")
def test_the_paper_s_synthetic_trace_has_its_hit_rate() -> None:
    requests = list(read_trace(TRACES / "synthetic_trace.jsonl"))
    assert len(requests) == 3993
    assert endless_hits(requests) == pytest.approx(0.6512, abs=5e-5)
