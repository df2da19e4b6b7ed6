"""The margin that admission adds: a quantile of how late things were, bounded by the objective."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.scheduling.margin import MOST_OF_OBJECTIVE, SHARE, Margin


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mean", "deviation"), [(0.05, 0.05), (0.0, 0.2), (-1.0, 0.3), (2.0, 0.01)])
def test_all_but_a_few_are_within_it(seed: int, mean: float, deviation: float) -> None:
    rng, margin = random.Random(seed), Margin()
    over = 0
    for n in range(2000):
        late = rng.gauss(mean, deviation)
        over += n >= 1000 and late > margin.seconds
        margin.observe(late)
    assert over / 1000 == pytest.approx(1 - SHARE, abs=0.03)


@given(st.lists(st.floats(-1e3, 1e3)), st.floats(0.001, 100))
def test_no_objective_is_eaten_up(lates: list[float], objective: float) -> None:
    margin = Margin()
    for late in lates:
        margin.observe(late)
    assert 0 <= margin.of(objective) <= MOST_OF_OBJECTIVE * objective
