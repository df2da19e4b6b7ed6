"""Prefill instances as the scheduler knows them: models, reported queues, and what was placed since."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from services.conductor.scheduling.decision import Candidate
from services.conductor.scheduling.matches import Gather, Matches
from services.conductor.scheduling.urgency import SURELY, Standing, Turn, later, passed
from services.conductor.scheduling.views import Floats, PrefillView, prefill_seconds, without
from shared.latency import OnlineCorrection, PrefillModel
from shared.messages import Load

AS_PUBLISHED = OnlineCorrection()
NOTHING_BELOW: Mapping[str, tuple[int, float]] = {}


@dataclass
class PrefillSeat:
    """``unsettled``: booking -> predicted seconds, for bookings that no report of the instance covers yet.
    ``coming``: seconds that conductors who are not heard have reserved there.
    ``transfers``: booking -> when its planned fetch will be done. ``standing``: bookings without their first token,
    where their place in the queue is known. ``published``: the instance's own model, which
    ``correction`` scales by what really happened. ``idle``: its last report had nothing queued and nothing running."""

    id: str
    agent: str
    published: PrefillModel
    correction: OnlineCorrection = AS_PUBLISHED
    open: bool = True
    queue: float = 0.0
    reported_at: float = 0.0
    idle: bool = False
    turn: int = 0
    coming: float = 0.0
    unsettled: dict[int, float] = field(default_factory=dict)
    transfers: dict[int, float] = field(default_factory=dict)
    standing: dict[int, Standing] = field(default_factory=dict)

    @property
    def model(self) -> PrefillModel:
        own, factor = self.published, self.correction.factor
        return PrefillModel(own.base * factor, own.linear * factor, own.square * factor)

    def report(self, load: Load, now: float) -> None:
        before, self.idle = self.idle, not (load.queued or load.running or load.queued_tokens or load.queue_ms)
        if before and self.idle:
            self.correction = self.correction.faded(now - self.reported_at)
        seconds = load.queue_ms / 1000.0
        if not seconds and load.queued_tokens:
            seconds = self.published.seconds(load.queued_tokens, 0)
        self.queue, self.reported_at = seconds * self.correction.factor, now


class Prefills:
    """Seats by id; the seats are the truth, the columns a cache of them."""

    def __init__(self) -> None:
        self.seats: dict[str, PrefillSeat] = {}
        self._moving: dict[int, str] = {}  # bookings with a planned fetch
        self._turns = 0
        self._fastest: tuple[float, float] | None = None
        self._rebuild()

    def put(self, id: str, agent: str, model: PrefillModel) -> None:
        seat = self.seats.get(id)
        if seat is None:
            self.seats[id] = PrefillSeat(id, agent, model)
        elif (seat.agent, seat.published) == (agent, model):
            return
        else:
            seat.agent, seat.published = agent, model
        self._rebuild()

    def observe(self, id: str, tokens: int, cached: int, seconds: float) -> None:
        """How long a prefill of ``tokens`` tokens, ``cached`` of them not computed, really took there."""
        seat = self.seats.get(id)
        if seat:
            seat.correction = seat.correction.observed(seat.published.seconds(tokens, cached), seconds)
            self._fastest = None
            self._refresh(seat)

    def remove(self, id: str) -> None:
        if self.seats.pop(id, None):
            self._moving = {booking: seat for booking, seat in self._moving.items() if seat != id}
            self._rebuild()

    def set_open(self, id: str, open: bool) -> None:
        self.seats[id].open = open
        self._open[self._row[id]] = open

    def report(self, id: str, load: Load, now: float) -> None:
        seat = self.seats[id]
        before = seat.correction
        seat.report(load, now)
        if seat.correction is not before:
            self._fastest = None
        self._refresh(seat)

    def others(self, id: str, seconds: float) -> None:
        """What conductors who are not heard have reserved there."""
        seat = self.seats[id]
        if seat.coming != seconds:
            seat.coming = seconds
            self._refresh(seat)

    def book(self, booking: int, id: str, seconds: float, fetched_at: float, standing: Standing | None = None) -> None:
        seat = self.seats[id]
        self._turns += 1
        seat.turn = self._turns
        seat.unsettled[booking] = seconds
        if standing:
            seat.standing[booking] = standing
        if fetched_at:
            seat.transfers[booking] = fetched_at
            self._moving[booking] = id
        self._refresh(seat)

    def settle(self, booking: int, id: str) -> None:
        """The instance's reports cover the booking from now on."""
        seat = self.seats.get(id)
        if seat and seat.unsettled.pop(booking, None) is not None:
            self._refresh(seat)

    def end(self, booking: int, id: str) -> None:
        seat = self.seats.get(id)
        if seat:
            seat.unsettled.pop(booking, None)
            seat.transfers.pop(booking, None)
            seat.standing.pop(booking, None)
            self._moving.pop(booking, None)
            self._refresh(seat)

    def queue(self, now: float) -> Floats:
        waits: Floats = self._until - now
        np.maximum(waits, self._never, out=waits)
        waits += self._pending
        return waits

    @property
    def opened(self) -> int:
        """Instances that take new work."""
        return int(np.count_nonzero(self._open))

    def soonest(self, tokens: int, now: float, turn: Turn | None = None) -> tuple[float, float, PrefillModel] | None:
        """Of a prompt that is all there: seconds to its first token where that comes first, the least that any open
        instance takes when it has nothing else to do, and the former's model. None: no instance is open. ``turn``: it
        goes before those that are due later."""
        if not self.opened:
            return None
        work = np.where(self._open, self._hit(tokens), np.inf)
        price = self._before(self.queue(now), work, now, turn) + work
        row = int(price.argmin())
        return float(price[row]), float(work.min()), self.seats[self.ids[row]].model

    def _before(self, queue: Floats, work: Floats, now: float, turn: Turn | None) -> Floats:
        """The least of each queue that a prompt waits for."""
        if turn is None:
            return queue
        for row in (self._last > now + turn.due(0.0)).nonzero()[0].tolist():
            behind = later(self._standing[row], now + turn.due(float(work[row])) - 2 * SURELY)
            queue[row] = max(queue[row] - passed(behind), 0.0)
        return queue

    def _hit(self, tokens: int) -> Floats:
        """Seconds of a prefill of which all but the last token is at hand."""
        return prefill_seconds(self._base, self._linear, self._square, tokens, max(tokens - 1, 0))

    def at_best(self, tokens: int, now: float, limit: int = 8) -> list[Candidate]:
        """The open instances with what they would take if all of a prompt were there, least first."""
        queue = self.queue(now)
        price = queue + self._hit(tokens)
        rows = [row for row in np.argsort(price, kind="stable") if self._open[row]][:limit]
        return [Candidate(self.ids[row], 0, 0, float(queue[row]), float(price[row])) for row in rows]

    def view(
        self,
        now: float,
        matches: Mapping[str, int],
        promised: Mapping[str, tuple[int, float]],
        closed: Collection[str],
        below: Mapping[str, tuple[int, float]] = NOTHING_BELOW,
    ) -> PrefillView:
        """``below``: agent -> blocks of its match that are on its SSD, and how fast that reads (bytes per second)."""
        here: Floats = self._gather.blocks(Matches.of(matches)).astype(np.float64)
        slow, disk = self._nothing, self._ones
        if below and (with_ssd := self._rows_of_agent.keys() & below.keys()):
            slow, disk = slow.copy(), disk.copy()
            for agent in with_ssd:
                rows = self._rows_of_agent[agent]
                slow[rows], disk[rows] = below[agent]
        own, ready = self._promised(now, here, promised)
        return PrefillView(
            ids=self.ids,
            agents=self.agents,
            queue=self.queue(now),
            base=self._base,
            linear=self._linear,
            square=self._square,
            here=here,
            own=own,
            ready=ready,
            below=slow,
            disk=disk,
            inbound=np.maximum(self._inbound_until - now, 0.0) if self._moving else self._never,
            open=without(self._open, self._row, closed),
            turn=self._turn,
            on_disk=slow is not self._nothing,
            moving=bool(self._moving),
            fastest=self._slopes(),
            standing=self._standing,
            now=now,
            last=self._last,
        )

    def _slopes(self) -> tuple[float, float]:
        if self._fastest is None:
            self._fastest = (float(self._linear.min()), float(self._square.min())) if self.ids else (0.0, 0.0)
        return self._fastest

    def _promised(self, now: float, here: Floats, promised: Mapping[str, tuple[int, float]]) -> tuple[Floats, Floats]:
        """(own, ready) of a view: promises count where they are longer than what is there."""
        if not promised:
            return here, self._never
        known = [(self._row[id], blocks, at) for id, (blocks, at) in promised.items() if id in self._row]
        rows, blocks, until = zip(*known, strict=True) if known else ((), (), ())
        where, longer = np.array(rows, dtype=np.int64), np.array(blocks, dtype=np.int64)
        more = longer > here.take(where)
        own, ready = here.copy(), np.zeros(len(self.ids))
        own[where[more]] = longer[more]
        ready[where[more]] = np.maximum(np.array(until, dtype=np.float64)[more] - now, 0.0)
        return own, ready

    def _refresh(self, seat: PrefillSeat) -> None:
        row, model = self._row[seat.id], seat.model
        self._base[row], self._linear[row], self._square[row] = model.base, model.linear, model.square
        self._until[row] = seat.reported_at + seat.queue
        self._pending[row] = sum(seat.unsettled.values()) + seat.coming
        self._inbound_until[row] = max(seat.transfers.values(), default=0.0)
        self._turn[row] = seat.turn
        self._last[row] = max((one.due for one in seat.standing.values()), default=-math.inf)

    def _rebuild(self) -> None:
        seats = list(self.seats.values())
        self.ids = tuple(seat.id for seat in seats)
        self.agents = tuple(seat.agent for seat in seats)
        self._row = {id: row for row, id in enumerate(self.ids)}
        self._gather = Gather(self.agents)
        self._rows_of_agent: dict[str, list[int]] = {}
        for row, agent in enumerate(self.agents):
            self._rows_of_agent.setdefault(agent, []).append(row)
        self._base, self._linear, self._square = (np.zeros(len(seats)) for _ in range(3))
        self._open = np.array([seat.open for seat in seats], dtype=np.bool_)
        self._nothing, self._ones = np.zeros(len(seats), dtype=np.int64), np.ones(len(seats))
        self._turn, self._never = np.zeros(len(seats), dtype=np.int64), np.zeros(len(seats))
        self._fastest = None
        self._until = np.zeros(len(seats))
        self._pending, self._inbound_until = np.zeros(len(seats)), np.zeros(len(seats))
        self._last = np.full(len(seats), -math.inf)
        self._standing = [seat.standing.values() for seat in seats]
        for seat in seats:
            self._refresh(seat)
