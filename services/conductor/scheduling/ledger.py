"""What this conductor knows and has promised: the scheduler's inputs, kept by live attempts, never by counters.

Everything added by :meth:`Ledger.book` is gone after :meth:`Booking.end`, whatever happened in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from services.conductor.scheduling.agents import ALL_DRAM, Agents
from services.conductor.scheduling.decision import Decision
from services.conductor.scheduling.decodes import Decodes
from services.conductor.scheduling.matches import Matches
from services.conductor.scheduling.optimistic import Optimistic
from services.conductor.scheduling.prefills import NOTHING_BELOW, Prefills
from services.conductor.scheduling.views import Ask, View
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load

LINGER_S = 1.0
"""How long blocks that were just computed are taken for present: longer than the index takes to hear of them."""


class Booking:
    """One placed attempt. Its calls are idempotent and in any order; ``end`` is the owner's duty."""

    def __init__(self, ledger: Ledger, number: int, decision: Decision, keys: bytes) -> None:
        self._ledger = ledger
        self._number = number
        self._keys = keys
        self.decision = decision
        self._prefilling = self._open = True

    def settle_prefill(self) -> None:
        """The prefill instance's load reports cover this attempt from now on."""
        self._ledger.prefills.settle(self._number, self.decision.prefill)

    def settle_decode(self) -> None:
        """The decode instance's room reports cover this attempt from now on."""
        self._ledger.decodes.settle(self._number, self.decision.decode)

    def prefilled(self, now: float) -> None:
        """Its first token came: the blocks are committed, and the index speaks for them within moments."""
        if self._prefilling and self._open:
            self._ledger.decodes.join(self._number, now)
        self._end_prefill(now)

    def end(self) -> None:
        self._end_prefill()
        if self._open:
            self._open = False
            self._ledger.decodes.end(self._number, self.decision.decode)
            self._ledger.open_bookings.discard(self._number)

    def _end_prefill(self, first_token: float | None = None) -> None:
        if self._prefilling:
            self._prefilling = False
            ledger, decision = self._ledger, self.decision
            ledger.prefills.end(self._number, decision.prefill)
            if first_token is None or decision.prefill not in ledger.prefills.seats:
                ledger.optimistic.remove(decision.prefill, self._keys)
            else:
                ledger.linger(decision.prefill, self._keys, first_token)
            if decision.fetch_blocks:
                ledger.agents.end(self._number, decision.sources[0][0])


class Ledger:
    """Instances, agents, promises. ``link_rate``: bytes per second assumed of a link nobody has measured."""

    def __init__(self, link_rate: float = 1e9) -> None:
        self.prefills = Prefills()
        self.decodes = Decodes()
        self.agents = Agents(link_rate)
        self.optimistic = Optimistic()
        self.open_bookings: set[int] = set()
        self.lingering: deque[tuple[float, str, bytes]] = deque()  # (until, prefill instance, keys)
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
        """The decision is carried out: count it until the booking ends."""
        self._numbers += 1
        number, ready = self._numbers, now + decision.ttft
        fetched_at = now + decision.transfer if decision.fetch_blocks else 0.0
        work = max(decision.compute, decision.ttft - decision.queue)
        self.prefills.book(number, decision.prefill, work, fetched_at)
        leaves = ready + ask.expected_output * decision.tbt
        tokens = ask.tokens + ask.expected_output / 2
        self.decodes.book(number, decision.decode, ask.total_blocks, ready, leaves, tokens)
        if decision.fetch_blocks:
            size = float(decision.fetch_blocks * ask.block_bytes)
            self.agents.book(number, decision.sources[0][0], size, fetched_at)
        self.optimistic.add(decision.prefill, keys, ready)
        self.open_bookings.add(number)
        return Booking(self, number, decision, keys)
