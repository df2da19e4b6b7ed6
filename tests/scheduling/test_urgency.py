"""Short prompts before long ones, and long ones let in where they wait less: within bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.scheduling import (
    Ask,
    Decision,
    Kept,
    Lane,
    Ledger,
    Objectives,
    Rejection,
    Scheduler,
    Turn,
    policy,
)
from services.conductor.scheduling.urgency import NOT_PASSED, due, latest
from services.prefill.queue import PrefillQueue, due_at
from shared.latency import DecodeModel, PrefillModel
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


MODEL = PrefillModel(0.0, 1e-3, 0.0)
SCHEDULER = Scheduler(policy("global_cache"))


class Queue:
    """One prefill instance and its conductor at the time 0: what one was told, and what the other thinks of it."""

    def __init__(self, overtake: float = 0.0) -> None:
        self.overtake = overtake
        self.ledger, self.real = Ledger(), PrefillQueue(MODEL)
        self.ledger.put_prefill("p", "a", MODEL)
        self.ledger.put_decode("d", DecodeModel(0.01, 0.0, 0.0))
        self.tokens: dict[int, int] = {}
        self.promised: dict[int, float] = {}

    def ask(self, tokens: int, objective: float, priority: int = 0) -> Decision | Rejection:
        ask = Ask(tokens, 0, 32, 1000, 1, turn=Turn(objective, self.overtake, priority))
        decided = SCHEDULER.decide(ask, self.ledger.view(b"", {}, 0.0), Objectives(objective, 60.0))
        if isinstance(decided, Decision):
            self.ledger.book(decided, ask, b"", 0.0)
            number = len(self.tokens)
            self.tokens[number], self.promised[number] = tokens, objective
            left = due(objective, decided.alone, self.overtake)
            self.real.join((str(number), 1), due_at(0.0, int(1000 * left), priority), 0.0, tokens)
            self.real.ready((str(number), 1))
        return decided

    def done(self) -> dict[int, float]:
        """When each would have its first token if no more came, in the order of the queue."""
        now, found = 0.0, dict[int, float]()
        while (key := self.real.advance()) is not None:
            now += MODEL.seconds(self.tokens[int(key[0])], 0)
            found[int(key[0])] = now
            self.real.leave(key)
        return found


def test_a_strict_request_goes_before_patient_ones_and_is_not_refused_for_them() -> None:
    queue = Queue()
    for _ in range(5):
        queue.ask(1000, objective=30.0)
    assert isinstance(queue.ask(500, objective=3.0), Decision), "behind the whole queue it would take 5.5 s"
    assert queue.done()[5] <= 3.0


def test_an_urgent_one_does_too() -> None:
    queue = Queue()
    for _ in range(5):
        queue.ask(1000, objective=6.0)
    assert isinstance(queue.ask(2000, objective=6.0), Rejection)
    assert isinstance(queue.ask(500, objective=4.0, priority=1), Decision)


def test_a_short_one_does_where_it_may_overtake() -> None:
    for overtake, ttft in ((0.0, 6.1), (4.0, 2.1)):
        queue = Queue(overtake)
        for _ in range(6):
            queue.ask(1000, objective=30.0)
        decided = queue.ask(100, objective=30.0)
        assert isinstance(decided, Decision) and decided.ttft == pytest.approx(ttft)


def test_nobody_goes_first_at_the_cost_of_what_others_were_promised() -> None:
    queue = Queue()
    for _ in range(5):
        queue.ask(1000, objective=5.0)  # the last one just in time
    assert isinstance(queue.ask(500, objective=4.0), Rejection)


@given(
    asked=st.lists(st.tuples(st.integers(1, 3000), st.floats(0.5, 30.0)), max_size=12),
)
def test_who_is_let_in_before_others_is_in_time_and_so_are_they(asked: list[tuple[int, float]]) -> None:
    """Of equal priority, and by objectives alone: what is moved otherwise may be late by who moves it."""
    queue = Queue()
    for tokens, objective in asked:
        queue.ask(tokens, objective)
    late = [number for number, end in queue.done().items() if end > queue.promised[number] + 0.01]
    assert not late


@given(
    asked=st.lists(st.tuples(st.integers(1, 3000), st.floats(0.5, 30.0), st.integers(-9, 9)), max_size=12),
    last=st.tuples(st.integers(1, 3000), st.floats(0.5, 30.0), st.integers(-9, 9)),
    overtake=st.sampled_from([0.0, 4.0]),
)
def test_stage_0_knows_of_everybody_who_may_go_first(
    asked: list[tuple[int, float, int]], last: tuple[int, float, int], overtake: float
) -> None:
    queue = Queue(overtake)
    for one in asked:
        queue.ask(*one)
    tokens, objective, priority = last
    found = queue.ledger.prefills.soonest(tokens, 0.0, Turn(objective, overtake, priority))
    decided = queue.ask(*last)
    assert found and (found[0] <= objective or isinstance(decided, Rejection))


def test_two_are_not_passed() -> None:
    """One computes, one has its landing."""
    queue = Queue()
    for _ in range(NOT_PASSED):
        queue.ask(1000, objective=30.0)
    decided = queue.ask(100, objective=3.0)
    assert isinstance(decided, Decision) and decided.queue == pytest.approx(2.0)
    decided = queue.ask(100, objective=2.5)
    assert isinstance(decided, Decision) and decided.queue == pytest.approx(2.0)
