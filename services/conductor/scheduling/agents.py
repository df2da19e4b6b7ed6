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

FEW = 16
"""Rows that are sorted faster without numpy."""

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
    size = len(held)
    if size > MOST_SOURCES:
        ranked = held.copy()
        ranked.partition(size - MOST_SOURCES)
        least = int(ranked[size - MOST_SOURCES])
    else:
        least = 1
    return (held >= max(least, 1)).nonzero()[0]


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
        blocks, backlog = held.take(rows), self._backlogs(rows, now)
        below = self._below(rows, blocks, dram) if dram else None
        if len(rows) > 1:
            order = self._order(rows, blocks, below, backlog)
            rows, blocks, backlog = rows.take(order), blocks.take(order), backlog.take(order)
            below = None if below is None else below.take(order)
        return SourceView(
            agents=tuple([self._ids[row] for row in rows.tolist()]),
            blocks=blocks,
            dram=blocks if below is None else blocks - below,
            disk=self._disk.take(rows),
            rate=self._rate.take(rows),
            backlog=backlog,
            prefill=self._prefill.take(rows),
        )

    def _order(self, rows: Ints, blocks: Ints, below: Ints | None, backlog: Floats) -> Ints | list[int]:
        """The first :data:`MOST_SOURCES`: the longest, those with the least of it on SSD, the least loaded."""
        seconds, below = backlog / self._rate.take(rows), 0 * rows if below is None else below
        if len(rows) > FEW:
            ranked: Ints = np.lexsort((seconds, below, -blocks))[:MOST_SOURCES]
            return ranked
        keys = list(zip((-blocks).tolist(), below.tolist(), seconds.tolist(), strict=True))
        return sorted(range(len(keys)), key=keys.__getitem__)[:MOST_SOURCES]

    def _below(self, rows: Ints, blocks: Ints, dram: Mapping[str, int]) -> Ints:
        below = np.zeros(len(rows), dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            first = dram.get(self._ids[row])
            if first is not None:
                below[at] = blocks[at] - first
        return below

    def _backlogs(self, rows: Ints, now: float) -> Floats:
        backlog: Floats = self._backlog.take(rows)
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
