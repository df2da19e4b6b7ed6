"""What other conductors have placed, counted in this one's ledger like its own attempts. Pure; time is passed in.

Everybody tells everybody what it places, and once a second all that stands: what was lost on the way, or belongs to a
conductor that died, is gone within :data:`PATIENCE`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from services.conductor.scheduling.ledger import Booking, Ledger
from shared.messages import Promise, Promises, Ref, Step

PATIENCE = 3.5
"""Seconds of a conductor's silence after which its promises count no longer: by then instances drop its attempts."""


@dataclass
class Teller:
    """One other conductor. ``bookings`` by its numbers; ``over``: numbers told to be over lately, since messages
    overtake each other; ``heard``: when it last said anything."""

    heard: float
    bookings: dict[int, Booking] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)


class Others:
    """One for a ledger. ``placed`` hears of every promise that is new here."""

    def __init__(self, ledger: Ledger, placed: Callable[[Promise], None] | None = None) -> None:
        self._ledger = ledger
        self._placed = placed
        self._tellers: dict[Ref, Teller] = {}
        self._accepted: dict[str, set[Booking]] = {}  # by instance: no report of it since they were accepted there

    def __len__(self) -> int:
        """Promises of others that stand."""
        return sum(len(teller.bookings) for teller in self._tellers.values())

    @property
    def promises(self) -> dict[Ref, int]:
        """How many stand of each conductor that is heard."""
        return {ref: len(teller.bookings) for ref, teller in self._tellers.items()}

    def heard(self, now: float) -> set[str]:
        """Ids of the conductors that have said something of late."""
        return {ref.id for ref, teller in self._tellers.items() if now - teller.heard <= PATIENCE}

    def told(self, message: Promises, now: float) -> None:
        teller = self._tellers.setdefault(message.sender, Teller(now))
        teller.heard = now
        for promise in message.placed:
            self._take(teller, promise, now)
        for number, step in message.steps:
            self._step(teller, number, Step(step), now)
        if message.all is not None:
            self._compare(teller, message.all, now)

    def reported(self, instance: str) -> None:
        """A load report of that instance was taken in: it covers what had been accepted there before."""
        for booking in self._accepted.pop(instance, ()):
            if booking.promise.prefill == instance:
                booking.settle_prefill()
            if booking.promise.decode == instance:
                booking.settle_decode()

    def tick(self, now: float) -> None:
        """Now and then: those that fell silent are forgotten with all that they said."""
        for ref in [ref for ref, teller in self._tellers.items() if now - teller.heard > PATIENCE]:
            self._forget(ref)

    def left(self, living: Collection[Ref]) -> None:
        """Only these conductors are registered."""
        for ref in self._tellers.keys() - set(living):
            self._forget(ref)

    def _take(self, teller: Teller, promise: Promise, now: float) -> None:
        if promise.number in teller.bookings or promise.number in teller.over:
            return
        ledger = self._ledger
        if promise.prefill not in ledger.prefills.seats or promise.decode not in ledger.decodes.seats:
            return  # not known here yet: it is told again within a second
        teller.bookings[promise.number] = ledger.take(promise, now)
        if self._placed:
            self._placed(promise)

    def _step(self, teller: Teller, number: int, step: Step, now: float) -> None:
        booking = teller.bookings.get(number)
        if booking is None:
            if Step.OVER in step:
                teller.over.add(number)
            return
        if Step.AT_PREFILL in step:
            self._accepted.setdefault(booking.promise.prefill, set()).add(booking)
        if Step.AT_DECODE in step:
            self._accepted.setdefault(booking.promise.decode, set()).add(booking)
        if Step.PREFILLED in step:
            booking.prefilled(now)
        if Step.OVER in step:
            self._end(teller, number)
            teller.over.add(number)

    def _compare(self, teller: Teller, standing: list[Promise], now: float) -> None:
        """All that stands was told: what is missing here was lost, what is missing there is over."""
        for number in teller.bookings.keys() - {promise.number for promise in standing}:
            self._end(teller, number)
        teller.over &= {promise.number for promise in standing}  # the rest is never told of again
        for promise in standing:
            self._take(teller, msgspec.structs.replace(promise, keys=b""), now)
            if promise.number in teller.bookings:
                self._step(teller, promise.number, Step(promise.steps), now)

    def _end(self, teller: Teller, number: int) -> None:
        booking = teller.bookings.pop(number)
        for instance in {booking.promise.prefill, booking.promise.decode}:
            if waiting := self._accepted.get(instance):
                waiting.discard(booking)
                if not waiting:
                    del self._accepted[instance]
        booking.end()

    def _forget(self, ref: Ref) -> None:
        teller = self._tellers.pop(ref)
        for number in list(teller.bookings):
            self._end(teller, number)
