"""Store agents as sources: how fast they send, and what they are about to send."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from services.conductor.scheduling.views import SourceView

MOST_SOURCES = 4
"""Priced per decision: the longest matches, the least loaded first."""


@dataclass
class AgentSeat:
    """``planned``: booking -> (bytes of its planned fetch, when it will be done). ``rate`` 0: not known yet."""

    rate: float = 0.0
    backlog: float = 0.0
    prefill: bool = False
    planned: dict[int, tuple[float, float]] = field(default_factory=dict)

    def queued(self, now: float) -> float:
        """Bytes: what the agent reports contains what was planned before, so they are not added up."""
        if not self.planned:
            return self.backlog
        return max(self.backlog, sum(size for size, until in self.planned.values() if until > now))


class Agents:
    def __init__(self, link_rate: float) -> None:
        self.link_rate = link_rate
        self.seats: dict[str, AgentSeat] = {}

    def put(self, id: str, rate: float, backlog: float, prefill: bool) -> None:
        seat = self.seats.setdefault(id, AgentSeat())
        seat.rate, seat.backlog, seat.prefill = rate, backlog, prefill

    def remove(self, id: str) -> None:
        self.seats.pop(id, None)

    def book(self, booking: int, id: str, size: float, until: float) -> None:
        if id in self.seats:
            self.seats[id].planned[booking] = (size, until)

    def end(self, booking: int, id: str) -> None:
        if id in self.seats:
            self.seats[id].planned.pop(booking, None)

    def view(self, now: float, matches: Mapping[str, int]) -> SourceView:
        if not matches:
            return SourceView.none()
        found = [
            (-blocks, seat.queued(now) / (seat.rate or self.link_rate), id)
            for id, blocks in matches.items()
            if blocks > 0 and (seat := self.seats.get(id))
        ]
        best = heapq.nsmallest(MOST_SOURCES, found)
        if not best:
            return SourceView.none()
        seats = [self.seats[id] for _, _, id in best]
        rates = np.array([seat.rate or self.link_rate for seat in seats])
        return SourceView(
            agents=tuple(id for _, _, id in best),
            blocks=np.array([-blocks for blocks, _, _ in best], dtype=np.int64),
            rate=rates,
            backlog=np.array([seconds for _, seconds, _ in best]) * rates,
            prefill=np.array([seat.prefill for seat in seats], dtype=np.bool_),
        )
