"""Several conductors over one fleet: whatever the bus does, nobody's promises stay, and nobody promises too much."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.conductor.scheduling import Ask, Booking, Decision, Ledger, Scheduler, policy
from services.conductor.scheduling.ledger import LINGER_S
from services.conductor.scheduling.others import PATIENCE, Others
from services.conductor.scheduling.outbox import Outbox
from shared.blocks import KEY, chain_keys
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load, Promise, Promises, Ref, Step
from tests.examples import examples

BLOCK = 4
TOTAL = 40
SIZE = 7
"""Blocks that a request is promised at decode: 5 of prompt, 2 of output."""


@dataclass
class Attempt:
    booking: Booking
    decode: str


class Conductor:
    """The pure parts of one, with the shell's order of calls."""

    def __init__(self, name: str, others: int, prefills: int = 3, decodes: int = 2) -> None:
        self.ref = Ref(name, 1)
        self.ledger = Ledger(link_rate=1e6)
        self.outbox = Outbox()
        self.others = Others(self.ledger)
        self.ledger.others = others
        self.now = 0.0
        self.ledger.told = lambda promise, step: self.outbox.told(promise, step, self.now)
        for i in range(prefills):
            self.ledger.put_prefill(f"p{i}", f"a{i}", PrefillModel(0.0, 0.001, 0.0))
            self.ledger.put_agent(f"a{i}", prefill=True)
        for i in range(decodes):
            self.ledger.put_decode(f"d{i}", DecodeModel(0.01, 0.001, 0.0))

    def place(self, prompt: int) -> Attempt | None:
        tokens = np.arange(5 * BLOCK, dtype=np.uint32) + 1000 * prompt
        keys = chain_keys(b"r" * 16, tokens, BLOCK)
        ask = Ask(len(tokens), len(keys) // KEY, BLOCK, 1000, 2 * BLOCK)
        view = self.ledger.view(keys, {}, self.now, block_size=BLOCK)
        decided = Scheduler(policy("global_cache")).decide(ask, view, None)
        if not isinstance(decided, Decision):
            return None
        assert ask.total_blocks == SIZE
        return Attempt(self.ledger.book(decided, ask, keys, self.now), decided.decode)

    def message(self, to: Conductor, everything: bool = False) -> Promises:
        news = self.outbox.news()
        more = self.outbox.all(self.now) if everything else None
        placed, steps = (news.placed, news.steps) if news else ([], [])
        return Promises(sender=self.ref, target=to.ref, placed=placed, steps=steps, all=more)

    def counted(self) -> list[tuple[str, str, int]]:
        """What it counts of others."""
        bookings = [b for teller in self.others._tellers.values() for b in teller.bookings.values()]
        return sorted((b.promise.prefill, b.promise.decode, b.promise.blocks) for b in bookings)

    def standing(self) -> list[tuple[str, str, int]]:
        promises = [one.promise for one in self.outbox.standing.values()]
        return sorted((p.prefill, p.decode, p.blocks) for p in promises)


class TwoConductors(RuleBasedStateMachine):
    """Decode instances accept whatever comes and count it; reports and news arrive when they like, in order. What both
    have promised of one never exceeds its room by more than one request."""

    def __init__(self) -> None:
        super().__init__()
        self.conductors = [Conductor("a", 1), Conductor("b", 1)]
        self.attempts: list[list[Attempt]] = [[], []]
        self.news: list[deque[tuple[Promises, list[Promise]]]] = [deque(), deque()]  # towards each
        for i in range(2):
            for decode in ("d0", "d1"):
                self.report(i, decode)

    def held(self, decode: str) -> int:
        return SIZE * sum(a.decode == decode for mine in self.attempts for a in mine)

    @rule(i=st.integers(0, 1), prompt=st.integers(0, 3))
    def place(self, i: int, prompt: int) -> None:
        attempt = self.conductors[i].place(prompt)
        if attempt:
            self.attempts[i].append(attempt)

    @rule(i=st.integers(0, 1))
    def flush(self, i: int) -> None:
        message = self.conductors[i].message(self.conductors[1 - i])
        self.news[1 - i].append((message, message.placed))

    @precondition(lambda self: any(self.news))
    @rule(i=st.integers(0, 1))
    def deliver(self, i: int) -> None:
        if self.news[i]:
            message, placed = self.news[i].popleft()
            self.conductors[i].others.told(message, self.conductors[i].now)
            for promise in placed:
                self.conductors[1 - i].ledger.heard(promise)

    @rule(i=st.integers(0, 1), decode=st.sampled_from(["d0", "d1"]))
    def report(self, i: int, decode: str) -> None:
        conductor, held = self.conductors[i], self.held(decode)
        load = Load(total_blocks=TOTAL, room_blocks=max(TOTAL - held, 0), running=held // SIZE)
        conductor.ledger.report(decode, load, conductor.now)
        for attempt in self.attempts[i]:
            if attempt.decode == decode:
                attempt.booking.settle_decode()
        conductor.others.reported(decode)

    @rule(i=st.integers(0, 1), at=st.integers(0, 20), first=st.booleans())
    def progress(self, i: int, at: int, first: bool) -> None:
        if self.attempts[i]:
            at %= len(self.attempts[i])
            if first:
                self.attempts[i][at].booking.prefilled(self.conductors[i].now)
            else:
                self.attempts[i].pop(at).booking.end()

    @invariant()
    def no_more_than_one_too_many(self) -> None:
        assert all(self.held(decode) <= TOTAL + SIZE for decode in ("d0", "d1"))  # D8

    def teardown(self) -> None:
        for i in range(2):
            for attempt in self.attempts[i]:
                attempt.booking.end()
        for i in range(2):
            self.flush(i)
            while self.news[1 - i]:
                self.deliver(1 - i)
        for conductor in self.conductors:
            assert nothing_left(conductor)


def nothing_left(conductor: Conductor) -> bool:
    ledger = conductor.ledger
    ledger.report("p0", Load(), conductor.now + LINGER_S)
    view = ledger.view(b"", {}, conductor.now + LINGER_S)
    clean = not ledger.open_bookings and not ledger.optimistic and not len(ledger.decodes.live)
    echoes = any(seat.echoes for seat in ledger.decodes.seats.values())
    return clean and not echoes and not conductor.others._accepted and not view.prefill.queue.any()


TestTwoConductors = TwoConductors.TestCase
TestTwoConductors.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)


EVENTS = ("place", "end", "first", "flush", "all", "lose", "deliver", "again")


@dataclass
class Wire:
    """What was sent and has not come: any of it may be lost, come late or twice."""

    messages: list[Promises] = field(default_factory=list)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 30))))
def test_whatever_is_lost_a_full_list_puts_right(script: list[tuple[str, int]]) -> None:
    one, two, wire = Conductor("a", 1), Conductor("b", 1), Wire()
    attempts: list[Attempt] = []
    for what, at in script:
        if what == "place" and (attempt := one.place(at % 4)):
            attempts.append(attempt)
        elif what == "end" and attempts:
            attempts.pop(at % len(attempts)).booking.end()
        elif what == "first" and attempts:
            attempts[at % len(attempts)].booking.prefilled(one.now)
        elif what in ("flush", "all"):
            wire.messages.append(one.message(two, what == "all"))
        elif wire.messages and what in ("lose", "deliver", "again"):
            message = wire.messages[at % len(wire.messages)]
            if what != "again":
                wire.messages.remove(message)
            if what != "lose":
                two.others.told(message, two.now)
    two.others.told(one.message(two, everything=True), two.now)
    assert two.counted() == one.standing()
    for attempt in attempts:
        attempt.booking.end()
    two.others.told(one.message(two, everything=True), two.now)
    assert not len(two.others) and nothing_left(two)


def test_two_requests_with_one_new_prompt_go_to_one_instance_through_two_conductors() -> None:
    """One prefill for a prefix that nobody has yet: the promise of its blocks is seen by the other conductor."""
    one, two = Conductor("a", 1), Conductor("b", 1)
    first = one.place(1)
    two.others.told(one.message(two), two.now)
    second = two.place(1)
    assert first and second and first.booking.promise.prefill == second.booking.promise.prefill
    other = two.place(2)
    assert other and other.booking.promise.prefill != first.booking.promise.prefill


def test_a_conductor_that_falls_silent_is_forgotten_with_all_it_promised() -> None:
    one, two = Conductor("a", 1), Conductor("b", 1)
    assert one.place(1) and one.place(2)
    two.others.told(one.message(two), 0.0)
    assert len(two.others) == 2 and two.others.heard(0.0) == {"a"}
    two.others.tick(PATIENCE)
    assert len(two.others) == 2
    two.others.tick(math.nextafter(PATIENCE, 10.0))
    assert not len(two.others) and nothing_left(two) and not two.others.heard(4.0)


def test_who_is_not_registered_any_more_is_forgotten_at_once() -> None:
    one, two = Conductor("a", 1), Conductor("b", 1)
    assert one.place(1)
    two.others.told(one.message(two), 0.0)
    two.others.left([Ref("a", 2)])  # another incarnation
    assert not len(two.others) and nothing_left(two)


def test_times_in_a_full_list_are_those_left() -> None:
    one = Conductor("a", 1)
    attempt = one.place(1)
    assert attempt
    one.now = 0.005
    (left,) = one.outbox.all(one.now)
    assert math.isclose(left.ready_ms, attempt.booking.promise.ready_ms - 5.0) and not left.keys
    one.now = 100.0
    assert one.outbox.all(one.now)[0].ready_ms == 0.0


def test_an_attempt_on_an_instance_not_known_here_counts_as_soon_as_it_is() -> None:
    one, two = Conductor("a", 1), Conductor("b", 1)
    attempt = one.place(1)
    assert attempt
    two.ledger.remove(attempt.decode)
    two.others.told(one.message(two), 0.0)
    assert not len(two.others)
    two.ledger.put_decode(attempt.decode, DecodeModel(0.01, 0.001, 0.0))
    two.others.told(one.message(two, everything=True), 0.0)
    assert len(two.others) == 1


def test_promises_keep_their_form_on_the_wire() -> None:
    one, two = Conductor("a", 1), Conductor("b", 1)
    attempt = one.place(1)
    assert attempt
    attempt.booking.prefilled(0.0)
    sent = one.message(two, everything=True)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Promises)
    assert back == sent and back.all and Step(back.all[0].steps) == Step.PREFILLED
