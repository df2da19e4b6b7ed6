"""Short prompts before long ones, and long ones let in where they wait less: within bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.scheduling import Decision, Kept, Lane, Objectives, Rejection, Scheduler, policy
from services.conductor.scheduling.urgency import due, latest
from tests.scheduling.cluster import Views

seconds = st.floats(0.001, 1000.0)
factors = st.floats(0.0, 100.0)


@given(objective=seconds, compute=seconds, other=seconds, overtake=factors)
def test_nobody_is_due_after_its_objective_and_short_ones_are_due_first(
    objective: float, compute: float, other: float, overtake: float
) -> None:
    short, long = sorted((compute, other))
    assert due(objective, short, overtake) <= due(objective, long, overtake) <= objective


def test_without_overtaking_the_objective_alone_counts() -> None:
    assert due(30.0, 0.1, 0.0) == due(30.0, 99.0, 0.0) == 30.0


@given(objective=seconds, compute=seconds, other=seconds, thrift=factors)
def test_an_idle_mesh_takes_whatever_it_can_do_in_time(
    objective: float, compute: float, other: float, thrift: float
) -> None:
    """What is let in waits the less the longer it computes, but always may compute at once."""
    limit = latest(objective, compute, thrift)
    assert limit <= objective * (1 + 1e-9)
    assert limit >= min(compute, objective)
    short, long = sorted((min(compute, objective), min(other, objective)))
    waits = [latest(objective, one, thrift) - one for one in (short, long)]
    assert waits[1] <= waits[0] + 1e-6 * objective


def test_without_thrift_the_objective_is_the_limit() -> None:
    assert latest(30.0, 20.0, 0.0) == 30.0


def test_a_long_prompt_is_refused_where_a_short_one_is_not(views: Views) -> None:
    """Both would begin after five seconds; the long one computes for 4.04 s."""
    view, wanted = views.all([5.0], [0], [], [0]), Objectives(ttft=10.0, tbt=1.0)
    thrifty = Scheduler(policy("global_cache"), thrift=10.0)
    assert isinstance(Scheduler(policy("global_cache")).decide(views.ask(4000), view, wanted), Decision)
    assert isinstance(thrifty.decide(views.ask(100), view, wanted), Decision)
    late = thrifty.decide(views.ask(4000), view, wanted)
    assert isinstance(late, Rejection) and late.reason == "ttft" and late.predicted > late.limit
    assert late.limit == pytest.approx(latest(10.0, late.predicted - 5.0, 10.0))
    shortage = late.shortage
    assert shortage and shortage.lane is Lane.PREFILL
    assert shortage.late == pytest.approx(late.predicted - late.limit)
    emptier = views.all([5.0 - shortage.late - 0.01], [0], [], [0])
    assert isinstance(thrifty.decide(views.ask(4000), emptier, wanted), Decision)
    assert isinstance(thrifty.decide(views.ask(4000), views.all([0.0], [0], [], [0]), wanted), Decision)


def test_with_thrift_too_an_idle_mesh_takes_what_it_can_do_beside_what_is_kept(views: Views) -> None:
    """It computes for 8.01 s, and may wait 0.22 s: what is kept for others is more, and the objective has room."""
    thrifty, wanted, kept = Scheduler(policy("global_cache"), thrift=10.0), Objectives(10.0, 1.0), Kept(seconds=1.0)
    idle, ask = views.all([0.0], [0], [], [0]), views.ask(8000)
    assert latest(10.0, 8.01, 10.0) < 8.01 + kept.seconds
    assert isinstance(thrifty.decide(ask, idle, wanted, kept), Decision)
    waits = thrifty.decide(ask, views.all([0.5], [0], [], [0]), wanted, kept)
    assert isinstance(waits, Rejection) and waits.limit == pytest.approx(latest(10.0, 8.01, 10.0))
    assert waits.shortage and waits.shortage.late == pytest.approx(8.51 - waits.limit)
    keeps = thrifty.decide(ask, idle, wanted, Kept(seconds=2.0))
    assert isinstance(keeps, Rejection) and (keeps.predicted, keeps.limit) == pytest.approx((10.01, 10.0))
    assert keeps.shortage and keeps.shortage.late == pytest.approx(0.01)


def test_what_others_will_have_computed_does_not_make_a_prompt_short(views: Views) -> None:
    """Its place in the queue must not be before that of the one it waits for."""
    view = views.all([1.0], [0], [], [0])
    view.prefill.own[:] = 3
    decided = Scheduler(policy("global_cache")).decide(views.ask(1000), view, None)
    assert isinstance(decided, Decision) and decided.compute < decided.alone < math.inf
