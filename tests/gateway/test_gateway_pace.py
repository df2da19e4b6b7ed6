"""Times between tokens: the metric is the mean of the worst tenth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.gateway.pace import Pace


def test_before_any_token_there_is_nothing() -> None:
    pace = Pace(5.0)
    assert (pace.ttft, pace.tbt()) == (None, None)


def test_one_token_has_a_ttft_and_no_interval() -> None:
    pace = Pace(5.0)
    pace.mark(7.5)
    assert (pace.ttft, pace.tbt()) == (2.5, None)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_it_is_the_mean_of_the_worst_tenth(intervals: list[float]) -> None:
    pace, now = Pace(0.0), 1.0
    pace.mark(now)
    for interval in intervals:
        pace.mark(now := now + interval)
    count = -(-len(intervals) // 10)
    worst = sorted(intervals)[-count:]
    assert pace.tbt() == pytest.approx(sum(worst) / count, rel=1e-3, abs=1e-3)


def test_a_choice_that_waited_for_another_has_intervals_and_no_ttft() -> None:
    pace = Pace(None)
    pace.mark(7.0)
    pace.mark(7.5)
    assert (pace.ttft, pace.tbt()) == (None, 0.5)
