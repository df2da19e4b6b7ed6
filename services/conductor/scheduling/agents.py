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

MOST_SECONDS = 1e6
"""Of backlog; they are told apart to a microsecond beside ten thousand blocks."""

Rank = tuple[int, int, float, int, float, float]
"""(less blocks, those on SSD, seconds of backlog, row; rate, backlog): sources in order."""

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
        elif (seat.rate, seat.backlog, seat.prefill, seat.disk) != (rate, backlog, prefill, disk):
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
        best = self._ranked(self._first(held, now) if not dram else held.nonzero()[0], held, dram, now)
        if not best:
            return SourceView.none()
        less, below, _, rows, rate, backlog = zip(*best, strict=True)
        blocks = [-one for one in less]
        return SourceView(
            agents=[self._ids[row] for row in rows],
            blocks=blocks,
            dram=[held - slow for held, slow in zip(blocks, below, strict=True)] if dram else blocks,
            disk=[self._disk[row] for row in rows],
            rate=rate,
            backlog=backlog,
            prefill=[self._prefill[row] for row in rows],
        )

    def _ranked(self, rows: Ints, held: Ints, dram: Mapping[str, int], now: float) -> list[Rank]:
        """Of ``rows`` the first :data:`MOST_SOURCES`: the longest, least of it on SSD, then the least loaded."""
        out = list[Rank]()
        for row, blocks in zip(rows.tolist(), held.take(rows).tolist(), strict=True):
            if blocks:
                id, rate = self._ids[row], self._rate[row]
                backlog = self.seats[id].queued(now) if id in self._planning else self._backlog[row]
                out.append((-blocks, blocks - dram.get(id, blocks), backlog / rate, row, rate, backlog))
        out.sort()
        return out[:MOST_SOURCES]

    def _first(self, held: Ints, now: float) -> Ints:
        """Those rows, where all is in DRAM, found by one number each: a block counts for more than any backlog."""
        if len(held) <= MOST_SOURCES:
            return held.nonzero()[0]
        order: Floats = held.astype(np.float64)
        order *= -MOST_SECONDS
        order += self._seconds
        for id in self._planning:
            seat, row = self.seats[id], self._row[id]
            order[row] += seat.queued(now) / self._rate[row] - self._seconds[row]
        first: Ints = order.argpartition(MOST_SOURCES - 1)[:MOST_SOURCES]
        return first

    def _refresh(self, id: str) -> None:
        seat, row = self.seats[id], self._row[id]
        rate = seat.rate or self.link_rate
        self._rate[row], self._disk[row] = rate, seat.disk or DISK_RATE
        self._backlog[row], self._prefill[row], self._seconds[row] = seat.backlog, seat.prefill, seat.backlog / rate

    def _rebuild(self) -> None:
        size = len(self.seats)
        self._ids = tuple(self.seats)
        self._row = {id: row for row, id in enumerate(self._ids)}
        self._gather = Gather(self._ids)
        self._rate, self._disk, self._backlog, self._prefill = [0.0] * size, [0.0] * size, [0.0] * size, [False] * size
        self._seconds = np.zeros(size)
        for id in self._ids:
            self._refresh(id)
