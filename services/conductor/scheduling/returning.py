"""The virtual queue: who was refused has a place in it, and comes back when capacity is there for it. Pure.

A refusal is told when it would be accepted. Were all told the same, all would come back at once, and all but one be
refused again. So each takes a place of its own, one behind the other at the rate at which capacity comes back; and
what is promised to those who are about to return is not given to those who have just come. Whoever does not come
back loses the place soon after its time, and the fewer come back, the less is kept for them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import StrEnum

HORIZON = 60.0
"""Seconds, the longest that anybody is told: the usual clients do not wait longer, whatever they are told."""
SHORTEST = 0.25
EARLY = 0.05
"""Who returns so little before its time is on time: clocks of timers are no better."""
GRACE, GRACE_SHARE = 2.0, 0.1
"""A place is kept so long behind its time, in seconds and as a share of the wait. Headers count whole seconds."""
SLACK_SHARE, LEAST_SLACK, MOST_SLACK = 0.05, 0.1, 1.0
"""So much later than its time everybody is told, a share of the wait within bounds in seconds: who came on the very
edge would be refused every other time."""
MOST = 65_536
"""Places; who finds none is told the horizon and has none."""
LOOKS = 64
"""Places looked at for what is kept: those whose time comes next."""
LEARN = 0.05
LEAST_BELIEF = 0.05
KEEP = 0.95
"""Of those who return on time, so many should be accepted. Where fewer are, capacity comes back more slowly than said.
"""
MOST_PACE = 3.0


class Lane(StrEnum):
    """What was short: time of prefill, or a sequence at decode."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Shortage:
    """Why a request was refused. ``late``: seconds until it would be accepted, were it alone (inf: never). ``takes``:
    seconds in which as much capacity comes back as it takes. ``objective``: its own for the first token, in seconds."""

    lane: Lane
    late: float
    takes: float
    objective: float = 0.0


@dataclass(frozen=True)
class Kept:
    """What is not for a request that has just come. ``seconds``: of all prefill instances together; ``requests``:
    sequences at decode."""

    seconds: float = 0.0
    requests: int = 0


NOTHING_KEPT = Kept()


@dataclass(order=True)
class Place:
    """``due``: when there is capacity for it; ``told``: when its owner was told to come, a little later than that."""

    due: float
    ticket: int
    told: float = field(compare=False)
    shortage: Shortage = field(compare=False)

    @property
    def until(self) -> float:
        return self.due + GRACE + GRACE_SHARE * (self.due - self.told)


@dataclass
class Line:
    """The places of one lane, by their time. ``end``: when as much capacity has come back as is promised; ``again``:
    the same for those whose time had come before. ``belief``: share of those who were told to come back that did,
    lately. ``pace``: how much more slowly capacity comes back than was said."""

    places: list[Place] = field(default_factory=list)
    end: float = float("-inf")
    again: float = float("-inf")
    belief: float = 1.0
    pace: float = 1.0

    def kept(self, accepted: bool) -> None:
        """Somebody came when told."""
        step = (KEEP - 1) if accepted else KEEP
        self.pace = min(max(1.0, self.pace * (1 + LEARN * step)), MOST_PACE)

    def takes(self, shortage: Shortage) -> float:
        """Seconds until the next one may come."""
        return shortage.takes * self.belief * self.pace

    def learn(self, came: bool) -> None:
        self.belief = max(LEAST_BELIEF, self.belief + LEARN * (came - self.belief))

    def behind(self, now: float, objective: float) -> float:
        """Seconds of capacity that whoever comes now has to leave, so that everybody finds enough in time: at each
        place there must have come back what those need who are due until then, as far as they are believed to come."""
        needed = most = 0.0
        for place in self.places[:LOOKS]:  # at every request of an overload: no calls in here
            shortage = place.shortage
            if shortage.objective <= objective:
                needed += shortage.takes * self.belief
                behind = needed - (place.due - now) if place.due > now else needed
                if behind > most:
                    most = behind
        return most


class VirtualQueue:
    """``ticket``: what a request has in common with its retry, 0 for one that will not be known again."""

    def __init__(self) -> None:
        self._lines = {lane: Line() for lane in Lane}
        self._by_ticket: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def refuse(self, now: float, ticket: int, shortage: Shortage) -> float:
        """Seconds after which to come back. A place is booked, where there is one within the horizon; who has one
        keeps it: it is told the rest of its time, or, where its time has come and it was refused all the same, comes
        before everybody else."""
        self._expire(now)
        late = max(shortage.late, SHORTEST)
        if (mine := self._by_ticket.get(ticket)) is not None:
            if now < mine.due - EARLY:
                return told(mine.due - now)
            self._drop(mine)
            return self._again(now, ticket, late, shortage)
        line = self._lines[shortage.lane]
        wait = late + max(line.end - now, 0.0)
        if wait > HORIZON or len(self._by_ticket) >= MOST:
            return HORIZON
        line.end = max(line.end, now) + line.takes(shortage)
        return self._place(now, ticket, wait, shortage) if ticket else told(wait)

    def served(self, now: float, ticket: int) -> None:
        """It was accepted: its place is free. Idempotent."""
        if (mine := self._by_ticket.get(ticket)) is not None:
            line = self._lines[mine.shortage.lane]
            if now >= mine.due - EARLY:
                line.kept(accepted=True)
            line.learn(True)
            self._drop(mine)
        self._expire(now)

    def returns(self, now: float, ticket: int) -> bool:
        """Whether this is somebody whose time has come: what is kept is kept for it."""
        self._expire(now)
        mine = self._by_ticket.get(ticket)
        return mine is not None and now >= mine.due - EARLY

    def kept(self, now: float, objective: float) -> Kept:
        """What a request that has just come has to leave to others. ``objective``: its own for the first token, in
        seconds; those whose objective is laxer have to wait for it, not it for them."""
        if not self._by_ticket:
            return NOTHING_KEPT
        self._expire(now)
        decode = self._lines[Lane.DECODE]
        every = decode.places[0].shortage.takes if decode.places else 1.0
        requests = decode.behind(now, math.inf) / max(every, 1e-6)
        return Kept(self._lines[Lane.PREFILL].behind(now, objective), min(round(requests), len(decode.places)))

    def _again(self, now: float, ticket: int, late: float, shortage: Shortage) -> float:
        """Behind those who were told wrong before it."""
        line = self._lines[shortage.lane]
        wait = min(late + max(line.again - now, 0.0), HORIZON)
        line.again = max(line.again, now) + shortage.takes * line.pace
        line.kept(accepted=False)
        line.learn(True)
        return self._place(now, ticket, wait, shortage)

    def _place(self, now: float, ticket: int, wait: float, shortage: Shortage) -> float:
        place = self._by_ticket[ticket] = Place(now + wait, ticket, now, shortage)
        insort(self._lines[shortage.lane].places, place)
        return told(wait)

    def _drop(self, place: Place) -> None:
        del self._by_ticket[place.ticket]
        line = self._lines[place.shortage.lane]
        del line.places[bisect_left(line.places, place)]

    def _expire(self, now: float) -> None:
        for line in self._lines.values():
            while line.places and line.places[0].until < now:
                self._drop(line.places[0])
                line.learn(False)


def told(wait: float) -> float:
    """What somebody is told for whom there is capacity in ``wait`` seconds."""
    return min(wait + min(max(SLACK_SHARE * wait, LEAST_SLACK), MOST_SLACK), HORIZON)
