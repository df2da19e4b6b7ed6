"""Store agents as sources: how fast they send, and what they are about to send."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from services.conductor.scheduling.views import SourceView

DISK_RATE = 500e6
"""Bytes per second assumed of an SSD that nobody has measured."""

MOST_SOURCES = 4
"""Priced per decision: the longest matches, those with the least of it on SSD first, then the least loaded."""

ALL_DRAM: Mapping[str, int] = {}


@dataclass
class AgentSeat:
    """``planned``: booking -> (bytes of its planned fetch, when it will be done). ``rate``, ``disk`` (bytes per second
    read from its SSD) 0: not known yet."""

    rate: float = 0.0
    disk: float = 0.0
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

    def put(self, id: str, rate: float, backlog: float, prefill: bool, disk: float = 0.0) -> None:
        seat = self.seats.setdefault(id, AgentSeat())
        seat.rate, seat.backlog, seat.prefill, seat.disk = rate, backlog, prefill, disk

    def below(self, matches: Mapping[str, int], dram: Mapping[str, int]) -> dict[str, tuple[int, float]]:
        """Agent -> blocks of its match that are on its SSD, and bytes per second read from there."""
        found = {id: matches.get(id, 0) - first for id, first in dram.items()}
        return {id: (blocks, self._disk(id)) for id, blocks in found.items() if blocks > 0}

    def _disk(self, id: str) -> float:
        seat = self.seats.get(id)
        return (seat.disk if seat else 0.0) or DISK_RATE

    def remove(self, id: str) -> None:
        self.seats.pop(id, None)

    def book(self, booking: int, id: str, size: float, until: float) -> None:
        if id in self.seats:
            self.seats[id].planned[booking] = (size, until)

    def end(self, booking: int, id: str) -> None:
        if id in self.seats:
            self.seats[id].planned.pop(booking, None)

    def view(self, now: float, matches: Mapping[str, int], dram: Mapping[str, int] = ALL_DRAM) -> SourceView:
        """``dram``: agent -> blocks of its match before the first on its SSD, where there is one."""
        if not matches:
            return SourceView.none()
        known = {id: blocks for id, blocks in matches.items() if blocks > 0 and id in self.seats}
        if not known:
            return SourceView.none()
        least = min(heapq.nlargest(MOST_SOURCES, known.values()))  # few of many agents are worth a closer look
        seated = ((blocks, self.seats[id], id) for id, blocks in known.items() if blocks >= least)
        found = [
            (-blocks, blocks - dram.get(id, blocks), seat.queued(now) / (seat.rate or self.link_rate), id)
            for blocks, seat, id in seated
        ]
        best = heapq.nsmallest(MOST_SOURCES, found)
        seats = [self.seats[id] for *_, id in best]
        rates = np.array([seat.rate or self.link_rate for seat in seats])
        return SourceView(
            agents=tuple(id for *_, id in best),
            blocks=np.array([-blocks for blocks, *_ in best], dtype=np.int64),
            dram=np.array([-blocks - below for blocks, below, *_ in best], dtype=np.int64),
            disk=np.array([seat.disk or DISK_RATE for seat in seats]),
            rate=rates,
            backlog=np.array([seconds for _, _, seconds, _ in best]) * rates,
            prefill=np.array([seat.prefill for seat in seats], dtype=np.bool_),
        )
