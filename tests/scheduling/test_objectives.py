"""What is refused for an objective, what is kept for others, and what is promised."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from services.conductor.scheduling import (
    Decision,
    Kept,
    Lane,
    Objectives,
    Rejection,
    Scheduler,
    View,
    policy,
)
from tests.scheduling.cluster import Views


def scheduler(name: str = "global_cache") -> Scheduler:
    return Scheduler(policy(name))


def test_objectives(views: Views) -> None:
    view = views.all([5.0], [0], [], [0])
    ask = views.ask(1000, waited=2.0)
    late = scheduler().decide(ask, view, Objectives(ttft=6.0, tbt=1.0))
    assert isinstance(late, Rejection) and late.reason == "ttft"
    assert late.predicted == pytest.approx(2.0 + 5.0 + 0.01 + 1.0) and late.limit == 6.0
    assert late.shortage and late.shortage.lane is Lane.PREFILL and late.shortage.objective == 6.0
    assert (late.shortage.late, late.shortage.takes) == pytest.approx((2.01, 1.01))
    slow = scheduler().decide(ask, view, Objectives(ttft=60.0, tbt=0.001))
    assert isinstance(slow, Rejection) and slow.reason == "tbt"
    assert isinstance(scheduler().decide(ask, view, Objectives(60.0, 1.0)), Decision)
    assert isinstance(scheduler().decide(ask, view, None), Decision)


def test_who_finds_the_batch_full_waits_for_a_place(views: Views) -> None:
    """d0 has a place when prefill ends, d1 has one now: its third comes before that. A sequence stays for 66 s."""
    live = {
        "live_row": np.array([0, 0, 1]),
        "live_joins": np.array([0.0, 0.0, 2.0]),
        "live_leaves": np.array([3.0, 99.0, 98.0]),
        "live_tokens": np.zeros(3),
    }
    view = views.all([5.0], [0], [], [0, 0])

    def decide(limit: float, tbt: float, output: int = 16) -> Decision | Rejection:
        decode = views.decode([0, 2], limit=np.full(2, limit), **live)
        ask = views.ask(1000, expected_output=output)
        return scheduler().decide(ask, View(view.prefill, decode, view.sources), Objectives(60.0, tbt))

    fits, full = decide(3.0, 1.0), decide(1.0, 1.0)
    assert isinstance(fits, Decision) and fits.decode == "d0" and fits.tbt == pytest.approx(0.02 + 0.001 * 2)
    assert isinstance(full, Rejection) and full.reason == "tbt"
    assert full.predicted == pytest.approx(0.022 + 66.0 / 1.6) and full.shortage and full.shortage.late == 3.0
    patient, long = decide(1.0, 60.0), decide(1.0, 1.0, output=1000)  # a wait of 66 s in a hundred intervals
    assert isinstance(patient, Decision) and isinstance(long, Decision) and long.tbt == pytest.approx(0.022 + 0.66)


def test_who_is_content_with_less_does_not_slow_down_who_was_promised_more(views: Views) -> None:
    """On both a step would take 0.17 s: on d0 somebody was promised 0.15."""
    live = {
        "live_row": np.array([0, 1]),
        "live_joins": np.zeros(2),
        "live_leaves": np.full(2, 99.0),
        "live_tokens": np.zeros(2),
        "live_promised": np.array([0.15, 0.5]),
    }
    view = views.all([5.0], [0], [], [0, 0])

    def decide(rows: int, tbt: float) -> Decision | Rejection:
        columns = {name: column[:rows] for name, column in live.items()}
        decode = views.decode([0] * rows, per_sequence=np.full(rows, 0.075), **columns)
        return scheduler().decide(views.ask(1000), View(view.prefill, decode, view.sources), Objectives(60.0, tbt))

    beside = decide(2, 1.0)
    assert isinstance(beside, Decision) and beside.decode == "d1" and beside.promised == 1.0
    alone = decide(1, 1.0)
    assert isinstance(alone, Rejection) and (alone.reason, alone.limit) == ("tbt", 0.15)
    strict = decide(2, 0.1)
    assert isinstance(strict, Rejection) and (strict.reason, strict.limit) == ("tbt", 0.1)


def test_what_one_asks_for_keeps_nobody_away_beyond_the_objective_of_all(views: Views) -> None:
    wanted = Objectives(60.0, 0.15, held=0.2)
    strict = scheduler().decide(views.ask(1000), views.all([5.0], [0], [], [0]), wanted)
    lax = scheduler().decide(views.ask(1000), views.all([5.0], [0], [], [0]), replace(wanted, tbt=1.0))
    assert isinstance(strict, Decision) and strict.promised == 0.2
    assert isinstance(lax, Decision) and lax.promised == 1.0


def test_a_pace_that_no_idle_instance_keeps_is_never_waited_for(views: Views) -> None:
    never = scheduler().decide(views.ask(1000), views.all([5.0], [0], [], [3]), Objectives(60.0, 1e-6))
    assert isinstance(never, Rejection) and never.reason == "tbt"
    assert never.shortage and never.shortage.late == math.inf


def test_what_is_kept_for_others_is_not_given_away(views: Views) -> None:
    """Three more sequences would go on d0: the objective leaves room for them, and no more."""
    decode = views.decode([0, 99], per_sequence=np.full(2, 0.1), per_token=np.zeros(2))
    view = View(views.prefill([1.0], [0]), decode, views.source([]))
    ask, wanted = views.ask(1000), Objectives(ttft=3.0, tbt=0.335)  # it is ready after 2.01 s

    def decide(seconds: float = 0.0, requests: int = 0) -> Decision | Rejection:
        return scheduler().decide(ask, view, wanted, Kept(seconds, requests))

    assert isinstance(decide(0.9, 2), Decision)
    late, slow = decide(seconds=1.0), decide(requests=3)
    assert isinstance(late, Rejection) and late.reason == "ttft"
    assert late.shortage and late.shortage.late == pytest.approx(0.01)
    assert isinstance(slow, Rejection) and slow.reason == "no_room" and slow.shortage


def test_what_no_empty_mesh_could_do_in_time_is_not_waited_for(views: Views) -> None:
    never = scheduler().decide(views.ask(1000), views.all([5.0], [0], [], [0]), Objectives(ttft=1.0, tbt=1.0))
    assert isinstance(never, Rejection) and never.shortage and never.shortage.late == math.inf
