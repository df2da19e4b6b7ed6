"""The virtual queue: places one behind the other, kept for those who return, given up for those who do not."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.conductor.scheduling import Kept, Lane, Shortage, VirtualQueue
from services.conductor.scheduling.returning import (
    GRACE,
    GRACE_SHARE,
    HORIZON,
    LEAST_BELIEF,
    MOST_SLACK,
    SHORTEST,
    told,
)


def prefill(late: float, takes: float = 1.0, objective: float = 30.0) -> Shortage:
    return Shortage(Lane.PREFILL, late, takes, objective)


def test_each_is_told_a_time_of_its_own_at_the_rate_at_which_capacity_returns() -> None:
    queue = VirtualQueue()
    waits = [queue.refuse(0.0, ticket, prefill(2.0, 0.5)) for ticket in (1, 2, 3)]
    assert waits == [told(2.0), told(2.5), told(3.0)]
    assert queue.refuse(1.0, 4, prefill(2.0, 0.5)) == told(2.5)  # a second of it has passed
    assert queue.refuse(1.0, 5, Shortage(Lane.DECODE, 1.0, 0.1)) == told(1.0)  # decode has a line of its own
    assert queue.refuse(9.0, 6, prefill(0.01, 0.5)) == told(SHORTEST)


def test_everybody_is_told_a_little_more_than_would_do() -> None:
    assert [told(wait) for wait in (0.25, 4.0, 10.0, 30.0, 59.9)] == [0.35, 4.2, 10.5, 31.0, HORIZON]


def test_who_returns_too_early_keeps_its_place() -> None:
    queue = VirtualQueue()
    queue.refuse(0.0, 1, prefill(2.0))
    assert queue.refuse(0.0, 2, prefill(2.0)) == told(3.0)
    assert not queue.returns(1.0, 2) and queue.refuse(1.0, 2, prefill(1.0)) == told(2.0)
    assert queue.refuse(1.0, 3, prefill(1.0)) == told(1.0 + 2.0 - 1.0)
    assert queue.returns(2.96, 2) and len(queue) == 3


def test_who_is_refused_though_it_waited_comes_before_everybody_else() -> None:
    queue = VirtualQueue()
    for ticket in range(1, 11):
        queue.refuse(0.0, ticket, prefill(1.0))
    assert queue.returns(1.0, 1)
    assert queue.refuse(1.0, 1, prefill(0.4)) == told(0.4) and queue.returns(1.4, 1)
    assert queue.returns(3.9, 2) and queue.refuse(3.9, 2, prefill(0.4)) == told(0.4)
    assert queue.returns(3.9, 3) and queue.refuse(3.9, 3, prefill(0.4)) > told(1.4)  # not both at once


def test_where_those_who_return_are_refused_later_ones_are_told_to_come_more_slowly() -> None:
    queue = VirtualQueue()
    for ticket in range(1, 11):
        queue.refuse(0.0, ticket, prefill(1.0))
    for ticket in range(1, 11):
        assert queue.returns(float(ticket), ticket)
        queue.refuse(float(ticket), ticket, prefill(0.1))
        queue.served(ticket + 0.01, ticket)
    first, second = (queue.refuse(20.0, ticket, prefill(1.0, 5.0)) for ticket in (11, 12))
    assert second - first > 5.0 * 1.2
    assert second - first < 5.0 * 2.0


def test_what_is_promised_for_now_is_kept_from_who_just_came() -> None:
    queue = VirtualQueue()
    for ticket in (1, 2, 3):
        queue.refuse(0.0, ticket, prefill(10.0, 2.0))
    assert queue.kept(0.0, 30.0) == Kept()
    assert queue.kept(9.0, 30.0) == Kept(1.0)  # one comes in a second and takes two
    assert queue.kept(12.0, 30.0) == Kept(2.0 + 2.0)  # the third comes when they are done
    assert queue.kept(12.5, 30.0) == Kept(2.0 + 2.0 + 0.5)  # they are late
    assert queue.kept(12.0, 29.0) == Kept()  # who has less time does not wait for those who have more
    queue.served(12.0, 1)
    assert queue.kept(12.0, 30.0) == Kept(2.0)
    queue.refuse(12.0, 4, Shortage(Lane.DECODE, 1.0, 0.5))
    assert [queue.kept(at, 30.0).requests for at in (12.4, 12.8, 13.0)] == [0, 1, 1]


def test_who_does_not_come_back_loses_its_place_and_is_believed_less() -> None:
    queue = VirtualQueue()
    for ticket in range(1, 101):
        queue.refuse(0.0, ticket, prefill(1.0, 0.1))
    assert len(queue) == 100
    assert queue.kept(1.0 + GRACE + GRACE_SHARE, 30.0).seconds <= GRACE + 2 * GRACE_SHARE + 0.5
    assert not queue.returns(60.0, 1) and not len(queue)
    assert queue.refuse(60.0, 101, prefill(1.0, 0.1)) == told(1.0)
    assert queue.refuse(60.0, 102, prefill(1.0, 0.1)) == pytest.approx(told(1.0 + 0.1 * LEAST_BELIEF), abs=0.001)


def test_nobody_is_told_more_than_the_horizon_and_places_end_there() -> None:
    queue = VirtualQueue()
    waits = [queue.refuse(0.0, ticket, prefill(1.0)) for ticket in range(1, 201)]
    assert waits == [told(min(1.0 + i, HORIZON)) for i in range(200)]
    assert len(queue) == HORIZON
    assert queue.refuse(0.0, 500, prefill(math.inf)) == HORIZON
    assert queue.refuse(10.0, 501, prefill(1.0)) == pytest.approx(told(1.0 + 60.0 - 10.0))


def test_who_will_not_be_known_again_has_no_place() -> None:
    queue = VirtualQueue()
    assert [queue.refuse(0.0, 0, prefill(1.0)) for _ in range(3)] == [told(1.0), told(2.0), told(3.0)]
    assert not len(queue) and not queue.returns(9.0, 0)


class Returning(RuleBasedStateMachine):
    """Any order of refusals, returns and silence."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now = VirtualQueue(), 0.0
        self.told: dict[int, float] = {}

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(ticket=st.integers(0, 9), late=st.floats(-1, 90), takes=st.floats(0, 5), lane=st.sampled_from(Lane))
    def refuse(self, ticket: int, late: float, takes: float, lane: Lane) -> None:
        self.bounded()
        early, places = ticket in self.told and not self.queue.returns(self.now, ticket), len(self.queue)
        wait = self.queue.refuse(self.now, ticket, Shortage(lane, late, takes, 30.0))
        assert 0 < wait <= HORIZON
        if early:
            assert self.told[ticket] - MOST_SLACK <= self.now + wait <= self.told[ticket] + MOST_SLACK
        elif len(self.queue) > places or ticket in self.told:
            self.told[ticket] = self.now + wait

    @rule(ticket=st.integers(0, 9))
    def serve(self, ticket: int) -> None:
        self.queue.served(self.now, ticket)
        self.told.pop(ticket, None)
        assert not self.queue.returns(self.now, ticket)

    @invariant()
    def bounded(self) -> None:
        kept = self.queue.kept(self.now, 30.0)
        assert kept.seconds >= 0 and 0 <= kept.requests <= 9 and len(self.queue) <= 9
        for ticket, due in list(self.told.items()):
            if due + GRACE + GRACE_SHARE * HORIZON < self.now:
                assert not self.queue.returns(self.now, ticket)
            if not self.queue.returns(self.now, ticket) and due <= self.now:
                del self.told[ticket]


TestReturning = Returning.TestCase


# -- what it is for ----------------------------------------------------------------------------------------------


def play(load: float, obey: float, seed: int, seconds: float = 60.0) -> tuple[float, float]:
    """A server that does one request a second, and has an objective of five seconds; ``load`` requests come a second,
    of which the share ``obey`` returns when it was told to. (Share of the time that it was busy, of returns accepted).
    """
    rng, queue, order = random.Random(seed), VirtualQueue(), itertools.count(1)
    events = [
        (t, next(order), False) for t in itertools.accumulate(rng.expovariate(load) for _ in range(int(load * 60)))
    ]
    free = busy = 0.0
    returned = accepted = 0
    while events:
        now, ticket, again = heapq.heappop(events)
        if now > seconds:
            break
        kept = Kept() if queue.returns(now, ticket) else queue.kept(now, 5.0)
        ttft = max(free - now, 0.0) + 1.0 + kept.seconds
        returned += again
        if ttft <= 5.0:
            accepted += again
            queue.served(now, ticket)
            free, busy = max(free, now) + 1.0, busy + 1.0
        else:
            wait = queue.refuse(now, ticket, prefill(ttft - 5.0, 1.0, 5.0))
            if rng.random() < obey:
                heapq.heappush(events, (now + math.ceil(wait), ticket, True))  # the header counts whole seconds
    return busy / (seconds + 5.0), accepted / max(returned, 1)


@pytest.mark.parametrize("load", [2.0, 5.0, 10.0])
@pytest.mark.parametrize("obey", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_d3_whoever_obeys_is_mostly_accepted_and_nothing_idles(load: float, obey: float, seed: int) -> None:
    busy, accepted = play(load, obey, seed)
    assert busy >= 0.9  # of a minute and the five seconds after it; it takes some to fill up
    assert not obey or accepted >= 0.7


@given(st.integers(0, 1000))
def test_without_contention_nobody_is_refused(seed: int) -> None:
    busy, _ = play(0.3, 1.0, seed)
    assert busy <= 0.6
