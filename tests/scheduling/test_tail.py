"""What is predicted between tokens is what objectives are held against: the mean of the worst tenth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.scheduling import Decision, Objectives, Rejection, Scheduler, View, policy
from services.conductor.scheduling.tail import LEAST, MOST_OF_OBJECTIVE, WINDOW_S, Tail, counted, jitter
from tests.scheduling.cluster import Views

EXCESS = st.floats(-10, 10)


def learnt(*excesses: float, at: float = 0.0) -> Tail:
    tail = Tail()
    for excess in excesses:
        tail.observe(excess, at)
    return tail


def test_half_of_the_answers_were_slower() -> None:
    assert learnt(*(0.01 * n for n in range(1, 12))).seconds(0.0) == pytest.approx(0.06)


def test_a_few_answers_that_were_held_up_do_not_count() -> None:
    assert learnt(*[0.02] * 20, *[10.0] * 15).seconds(0.0) == 0.02


@given(st.lists(EXCESS, max_size=200))
def test_it_is_never_negative_nor_more_than_was_seen(excesses: list[float]) -> None:
    assert 0 <= learnt(*excesses).seconds(0.0) <= max([0.0, *excesses])


@given(st.lists(st.tuples(st.floats(0, 5), EXCESS), max_size=100))
def test_what_is_old_is_forgotten(seen: list[tuple[float, float]]) -> None:
    """Whatever came before, nobody is refused for it for ever."""
    tail, now = Tail(), 0.0
    for later, excess in seen:
        now += later
        tail.observe(excess, now)
    assert tail.seconds(now + WINDOW_S + 0.1) == 0.0


def test_few_answers_are_not_believed() -> None:
    assert learnt(*[0.5] * (LEAST - 1)).seconds(0.0) == 0.0


@given(st.floats(0, 100), st.floats(0.001, 60))
def test_no_objective_is_eaten_up(tail: float, objective: float) -> None:
    assert counted(tail, objective) == min(tail, MOST_OF_OBJECTIVE * objective)
    assert counted(tail, np.array([objective, np.inf])) == pytest.approx([counted(tail, objective), tail])


def decide(views: Views, tail: float, tbt: float, promised: float = np.inf) -> Decision | Rejection:
    """An instance where a step takes 21 ms, 22 ms where somebody decodes who was ``promised``."""
    view = views.all([5.0], [0], [], [0])
    one: dict[str, Any] = {}
    if promised < np.inf:
        one = {"live_row": np.array([0]), "live_joins": np.zeros(1), "live_leaves": np.full(1, 99.0)}
        one |= {"live_tokens": np.zeros(1), "live_promised": np.array([promised])}
    decode = replace(views.decode([0], **one), tail=tail)
    return Scheduler(policy("global_cache")).decide(
        views.ask(1000), View(view.prefill, decode, view.sources), Objectives(60.0, tbt)
    )


def test_it_is_part_of_what_is_predicted_and_not_of_a_step(views: Views) -> None:
    decided = decide(views, 0.03, 0.1)
    assert isinstance(decided, Decision) and (decided.step, decided.tbt) == pytest.approx((0.021, 0.051))


def test_it_counts_against_the_objective(views: Views) -> None:
    refused = decide(views, 0.03, 0.04)
    assert isinstance(refused, Rejection) and refused.reason == "tbt"
    assert (refused.predicted, refused.limit) == pytest.approx((0.021 + 0.02, 0.04))
    assert isinstance(decide(views, 0.01, 0.04), Decision)


def test_it_counts_against_what_others_were_promised(views: Views) -> None:
    refused = decide(views, 0.03, 1.0, promised=0.04)
    assert isinstance(refused, Rejection) and refused.reason == "tbt" and refused.limit == 0.04
    assert isinstance(decide(views, 0.015, 1.0, promised=0.04), Decision)


def test_what_only_the_tail_refuses_passes_with_it(views: Views) -> None:
    refused = decide(views, 0.03, 0.04)
    assert isinstance(refused, Rejection) and refused.shortage and refused.shortage.late == WINDOW_S
    never = decide(views, 0.03, 0.02)
    assert isinstance(never, Rejection) and never.shortage and never.shortage.late == np.inf
    assert isinstance(decide(views, 0.0, 0.04), Decision)


def test_a_batch_that_grew_is_no_jitter() -> None:
    """Its steps took 50 ms instead of 20, all of them: whoever comes next is told 50 by the batch alone."""
    steady = [9.0] + [0.05] * 30  # the first is the hand-over
    assert jitter(0.05, 0.02, steady) == pytest.approx(0.0)
    assert jitter(0.08, 0.02, steady) == pytest.approx(0.03)


def test_a_batch_that_shrank_leaves_what_was_predicted() -> None:
    assert jitter(0.06, 0.05, [0.06] + [0.01] * 30) == pytest.approx(0.01)
    assert jitter(0.06, 0.05, [0.06]) == pytest.approx(0.01)


def test_a_stall_of_the_machine_refuses_nobody_whose_step_is_short(views: Views) -> None:
    assert isinstance(decide(views, 30.0, 0.05), Decision)
