"""Store agents as sources: how fast they send, and what they are about to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from services.conductor.scheduling.matches import Gather, Matches
from services.conductor.scheduling.views import Floats, Ints, SourceView

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


def longest(held: Ints) -> Ints:
    """Rows of the longest matches, in order of rows: at least :data:`MOST_SOURCES` where there are so many, and none
    that is shorter than one left out. Few of many agents are worth a closer look."""
    most = int(held[held.argmax()]) if len(held) else 0
    if not most:
        return np.empty(0, dtype=np.int64)
    rows: Ints = (held == most).nonzero()[0]
    if len(rows) >= MOST_SOURCES or len(held) <= 1:
        return rows
    size = min(MOST_SOURCES, len(held))
    least = max(1, int(np.partition(held, len(held) - size)[-size]))
    return (held >= least).nonzero()[0]


class Agents:
    """Seats by id; the seats are the truth, the columns a cache of them."""

    def __init__(self, link_rate: float) -> None:
        self.link_rate = link_rate
        self.seats: dict[str, AgentSeat] = {}
        self._planning: set[str] = set()
        self._rebuild()

    def put(self, id: str, rate: float, backlog: float, prefill: bool, disk: float = 0.0) -> None:
        seat = self.seats.get(id)
        if seat is None:
            self.seats[id] = AgentSeat(rate, disk, backlog, prefill)
            self._rebuild()
        else:
            seat.rate, seat.backlog, seat.prefill, seat.disk = rate, backlog, prefill, disk
            self._refresh(id)

    def below(self, matches: Mapping[str, int], dram: Mapping[str, int]) -> dict[str, tuple[int, float]]:
        """Agent -> blocks of its match that are on its SSD, and bytes per second read from there."""
        found = {id: matches.get(id, 0) - first for id, first in dram.items()}
        return {id: (blocks, self._disk_of(id)) for id, blocks in found.items() if blocks > 0}

    def _disk_of(self, id: str) -> float:
        seat = self.seats.get(id)
        return (seat.disk if seat else 0.0) or DISK_RATE

    def remove(self, id: str) -> None:
        if self.seats.pop(id, None):
            self._planning.discard(id)
            self._rebuild()

    def book(self, booking: int, id: str, size: float, until: float) -> None:
        if id in self.seats:
            self.seats[id].planned[booking] = (size, until)
            self._planning.add(id)

    def end(self, booking: int, id: str) -> None:
        seat = self.seats.get(id)
        if seat:
            seat.planned.pop(booking, None)
            if not seat.planned:
                self._planning.discard(id)

    def view(self, now: float, matches: Mapping[str, int], dram: Mapping[str, int] = ALL_DRAM) -> SourceView:
        """``dram``: agent -> blocks of its match before the first on its SSD, where there is one."""
        held = self._gather.blocks(Matches.of(matches))
        rows = longest(held)
        if not len(rows):
            return SourceView.none()
        blocks = held[rows]
        below = self._below(rows, blocks, dram)
        backlog = self._backlogs(rows, now)
        if len(rows) > 1:
            seconds = backlog / self._rate[rows]
            equal = not dram and blocks[blocks.argmax()] == blocks[blocks.argmin()]
            order = seconds.argsort(kind="stable") if equal else np.lexsort((seconds, below, -blocks))
            first = order[:MOST_SOURCES]
            rows, blocks, below, backlog = rows[first], blocks[first], below[first], backlog[first]
        return SourceView(
            agents=tuple([self._ids[row] for row in rows.tolist()]),
            blocks=blocks,
            dram=blocks - below,
            disk=self._disk[rows],
            rate=self._rate[rows],
            backlog=backlog,
            prefill=self._prefill[rows],
        )

    def _below(self, rows: Ints, blocks: Ints, dram: Mapping[str, int]) -> Ints:
        below = np.zeros(len(rows), dtype=np.int64)
        if dram:
            for at, row in enumerate(rows.tolist()):
                first = dram.get(self._ids[row])
                if first is not None:
                    below[at] = blocks[at] - first
        return below

    def _backlogs(self, rows: Ints, now: float) -> Floats:
        backlog: Floats = self._backlog[rows]
        if self._planning:
            for id in self._planning:
                backlog[rows == self._row[id]] = self.seats[id].queued(now)
        return backlog

    def _refresh(self, id: str) -> None:
        seat, row = self.seats[id], self._row[id]
        self._rate[row], self._disk[row] = seat.rate or self.link_rate, seat.disk or DISK_RATE
        self._backlog[row], self._prefill[row] = seat.backlog, seat.prefill

    def _rebuild(self) -> None:
        size = len(self.seats)
        self._ids = tuple(self.seats)
        self._row = {id: row for row, id in enumerate(self._ids)}
        self._gather = Gather(self._ids)
        self._rate, self._disk, self._backlog = np.zeros(size), np.zeros(size), np.zeros(size)
        self._prefill = np.zeros(size, dtype=np.bool_)
        for id in self._ids:
            self._refresh(id)
