"""Back-off: grows while a child dies young, starts afresh once it has lived."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cli.backoff import FIRST, HEALTHY, LIMIT, LOOP, Backoff


@given(st.lists(st.floats(0, 2 * HEALTHY), max_size=40))
def test_delays_stay_between_the_first_and_the_limit(lives: list[float]) -> None:
    backoff = Backoff()
    for lived in lives:
        assert FIRST <= backoff.died(lived) <= LIMIT
        assert backoff.failures >= 1


def test_each_early_death_waits_longer_and_a_long_life_forgives() -> None:
    backoff = Backoff()
    delays = [backoff.died(1.0) for _ in range(LOOP)]
    assert delays == sorted(delays) and delays[0] < delays[-1]
    assert backoff.looping
    assert backoff.died(HEALTHY) == FIRST
    assert not backoff.looping
