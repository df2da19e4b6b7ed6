"""What this conductor knows and has promised: the scheduler's inputs, kept by live attempts, never by counters.

Everything added by :meth:`Ledger.book` is gone after :meth:`Booking.end`, whatever happened in between.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping

from services.conductor.scheduling.agents import ALL_DRAM, Agents
from services.conductor.scheduling.decision import Decision
from services.conductor.scheduling.decodes import Decodes
from services.conductor.scheduling.matches import Matches
from services.conductor.scheduling.optimistic import Optimistic
from services.conductor.scheduling.prefills import NOTHING_BELOW, Prefills
from services.conductor.scheduling.urgency import Standing
from services.conductor.scheduling.views import Ask, View
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load, Promise, Step

LINGER_S = 1.0
"""How long blocks that were just computed are taken for present: longer than the index takes to hear of them."""


Told = Callable[[Promise, Step], None]


class Booking:
    """One placed attempt, of this conductor or of another one. Its calls are idempotent and in any order; ``end`` is
    the owner's duty. ``told``: called with every step that is taken. ``foreign``: of its end we hear late, perhaps
    after a report that has it already."""

    def __init__(
        self, ledger: Ledger, number: int, promise: Promise, told: Told | None = None, foreign: bool = False
    ) -> None:
        self._ledger = ledger
        self._number = number
        self._foreign = foreign
        self._told = told
        self.promise = promise
        self.steps = Step(0)

    def settle_prefill(self) -> None:
        """The prefill instance's load reports cover this attempt from now on."""
        if self._take(Step.AT_PREFILL):
            self._ledger.prefills.settle(self._number, self.promise.prefill)

    def settle_decode(self) -> None:
        """The decode instance's room reports cover this attempt from now on."""
        if self._take(Step.AT_DECODE):
            self._ledger.decodes.settle(self._number, self.promise.decode)

    def prefilled(self, now: float) -> None:
        """Its first token came: the blocks are committed, and the index speaks for them within moments."""
        if self._take(Step.PREFILLED):
            self._ledger.decodes.join(self._number, now)
            self._end_prefill(now)

    def end(self) -> None:
        before = self.steps
        if self._take(Step.OVER):
            if Step.PREFILLED not in before:
                self._end_prefill()
            self._ledger.decodes.end(self._number, self.promise.decode, gives_back=not self._foreign)
            self._ledger.open_bookings.discard(self._number)

    def _take(self, step: Step) -> bool:
        """False where there is nothing to do."""
        if Step.OVER in self.steps or step in self.steps:
            return False
        self.steps |= step
        if self._told:
            self._told(self.promise, step)
        return True

    def _end_prefill(self, first_token: float | None = None) -> None:
        ledger, promise = self._ledger, self.promise
        ledger.prefills.end(self._number, promise.prefill)
        if first_token is None or promise.prefill not in ledger.prefills.seats:
            ledger.optimistic.remove(promise.prefill, promise.keys)
        else:
            ledger.linger(promise.prefill, promise.keys, first_token)
        if promise.source:
            ledger.agents.end(self._number, promise.source)


class Ledger:
    """Instances, agents, promises. ``link_rate``: bytes per second assumed of a link nobody has measured."""

    def __init__(self, link_rate: float = 1e9) -> None:
        self.prefills = Prefills()
        self.decodes = Decodes()
        self.agents = Agents(link_rate)
        self.optimistic = Optimistic()
        self.open_bookings: set[int] = set()
        self.lingering: deque[tuple[float, str, bytes]] = deque()  # (until, prefill instance, keys)
        self.told: Told | None = None
        """Who hears of the promises made here, and of every step that is taken of one."""
        self.others = 0
        """Conductors beside this one: what one places unheard, the others may be placing too, at the same moment."""
        self._numbers = 0

    # -- the fleet -------------------------------------------------------------------------------------

    def put_prefill(self, id: str, agent: str, model: PrefillModel) -> None:
        self.prefills.put(id, agent, model)

    def put_decode(self, id: str, model: DecodeModel) -> None:
        self.decodes.put(id, model)

    def put_agent(
        self, id: str, rate: float = 0.0, backlog: float = 0.0, prefill: bool = False, disk: float = 0.0
    ) -> None:
        self.agents.put(id, rate, backlog, prefill, disk)

    def remove(self, id: str) -> None:
        """An instance or an agent; unknown ids are ignored."""
        self.prefills.remove(id)
        self.decodes.remove(id)
        self.agents.remove(id)
        self._forget_lingering(id)

    def set_open(self, id: str, open: bool) -> None:
        """Whether the instance gets new work."""
        if id in self.prefills.seats:
            self.prefills.set_open(id, open)
        if id in self.decodes.seats:
            self.decodes.set_open(id, open)

    def report(self, id: str, load: Load, now: float) -> None:
        self._let_linger(now)
        if id in self.prefills.seats:
            self.prefills.report(id, load, now)
        if id in self.decodes.seats:
            self.decodes.report(id, load, now)

    def linger(self, instance: str, keys: bytes, now: float) -> None:
        """Promised blocks are there now: they count on until the index surely has them."""
        self.lingering.append((now + LINGER_S, instance, keys))

    def _let_linger(self, now: float) -> None:
        while self.lingering and self.lingering[0][0] <= now:
            _, instance, keys = self.lingering.popleft()
            self.optimistic.remove(instance, keys)

    def _forget_lingering(self, instance: str) -> None:
        for _, id, keys in [one for one in self.lingering if one[1] == instance]:
            self.optimistic.remove(id, keys)
        self.lingering = deque(one for one in self.lingering if one[1] != instance)

    # -- requests --------------------------------------------------------------------------------------

    def view(
        self,
        keys: bytes,
        matches: Mapping[str, int],
        now: float,
        closed: Collection[str] = (),
        block_size: int = 1,
        dram: Mapping[str, int] = ALL_DRAM,
    ) -> View:
        """For a prompt with the chain ``keys``; ``matches``: agent id -> blocks of it held there; ``dram``: how many of
        them are before the first that is on the SSD, where one is. ``closed``: ids that are out of the question for
        this request."""
        self._let_linger(now)
        matches = Matches.of(matches)
        below = self.agents.below(matches, dram) if dram else NOTHING_BELOW
        return View(
            prefill=self.prefills.view(now, matches, self.optimistic.match(keys), closed, below),
            decode=self.decodes.view(now, closed, block_size),
            sources=self.agents.view(now, matches, dram),
        )

    def book(self, decision: Decision, ask: Ask, keys: bytes, now: float) -> Booking:
        """The decision is carried out: count it until the booking ends, and tell others of it."""
        promise = promise_of(self._numbers + 1, decision, ask, keys)
        if self.told:
            self.told(promise, Step(0))
        booking = self._take(promise, now, self.told, foreign=False)
        if self.others:
            self.decodes.echo(promise.number, promise.decode, self.others * promise.blocks)
        return booking

    def heard(self, promise: Promise) -> None:
        """The other conductors have surely heard of a promise made here."""
        self.decodes.unecho(promise.number, promise.decode)

    def take(self, promise: Promise, now: float) -> Booking:
        """Another conductor's promise: count it until the booking ends. Its instances are known here."""
        return self._take(promise, now, None, foreign=True)

    def _take(self, promise: Promise, now: float, told: Told | None, foreign: bool) -> Booking:
        self._numbers += 1
        number, ready = self._numbers, now + promise.ready_ms / 1000
        fetched_at = now + promise.fetched_ms / 1000 if promise.source else 0.0
        self.prefills.book(number, promise.prefill, promise.work_ms / 1000, fetched_at, _standing(promise, now))
        leaves, promised = ready + promise.stays_ms / 1000, promise.tbt_ms / 1000 or math.inf
        self.decodes.book(number, promise.decode, promise.blocks, ready, leaves, promise.tokens, promised)
        if promise.source:
            self.agents.book(number, promise.source, float(promise.fetch_bytes), fetched_at)
        self.optimistic.add(promise.prefill, promise.keys, ready)
        self.open_bookings.add(number)
        return Booking(self, number, promise, told, foreign)


def _standing(promise: Promise, now: float) -> Standing | None:
    """None: nobody goes before it."""
    if promise.by_ms <= 0:
        return None
    return Standing(now + promise.due_ms / 1000, now + promise.by_ms / 1000, promise.work_ms / 1000)


def promise_of(number: int, decision: Decision, ask: Ask, keys: bytes) -> Promise:
    fetch = decision.fetch_blocks
    return Promise(
        number=number,
        prefill=decision.prefill,
        decode=decision.decode,
        work_ms=1000 * max(decision.compute, decision.ttft - decision.queue),
        ready_ms=1000 * decision.ttft,
        stays_ms=1000 * ask.expected_output * decision.step,
        blocks=ask.total_blocks,
        tokens=ask.tokens + ask.expected_output / 2,
        source=decision.sources[0][0] if fetch else "",
        fetch_bytes=fetch * ask.block_bytes,
        fetched_ms=1000 * decision.transfer if fetch else 0.0,
        keys=keys,
        tbt_ms=1000 * decision.promised if decision.promised < math.inf else 0.0,
        due_ms=1000 * ask.turn.due(decision.alone, ask.waited) if ask.turn else 0.0,
        by_ms=1000 * max(ask.turn.objective - ask.waited, 0.0) if ask.turn else 0.0,
    )
