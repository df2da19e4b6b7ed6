"""Decode instances as the scheduler knows them: reports about others' requests, and this conductor's own live ones."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from services.conductor.scheduling.tail import Tail
from services.conductor.scheduling.views import UNLIMITED, DecodeView, without
from shared.latency import DecodeModel, OnlineCorrection
from shared.messages import Load

INITIAL = 64
AS_PUBLISHED = OnlineCorrection()
LEAST_SPAN = 0.5
"""Seconds between two reports from which the time of a step can be told."""


@dataclass(frozen=True)
class Reported:
    at: float
    load: Load


@dataclass
class DecodeSeat:
    """``running``, ``kv_tokens``: of requests that are not ours. ``unsettled``: booking -> blocks that no report of
    the instance covers yet; ``settled``: those that its reports count. ``joined``: booking -> tokens, of those of ours
    that decode.
    ``echoes``: booking -> blocks kept free for what others may be placing at the same moment.
    ``room``: blocks, as reported; ``most``: the most ever reported, that of an empty instance. ``limit``: sequences in
    its batch at most.
    ``coming``: requests that conductors who are not heard have placed there and that do not decode yet, with
    ``coming_blocks`` in all. ``published``: the instance's own model, which ``correction`` scales by what really
    happened.
    """

    id: str
    published: DecodeModel
    correction: OnlineCorrection = AS_PUBLISHED
    open: bool = True
    running: float = 0.0
    kv_tokens: float = 0.0
    room: int = UNLIMITED
    most: int = 0
    total: int = UNLIMITED
    limit: float = np.inf
    turn: int = 0
    assigned: int = 0
    unsettled: dict[int, int] = field(default_factory=dict)
    settled: dict[int, int] = field(default_factory=dict)
    joined: dict[int, float] = field(default_factory=dict)
    echoes: dict[int, int] = field(default_factory=dict)
    coming: int = 0
    coming_blocks: int = 0
    last: Reported | None = None

    @property
    def model(self) -> DecodeModel:
        own, factor = self.published, self.correction.factor
        return DecodeModel(own.base * factor, own.per_sequence * factor, own.per_token * factor)

    def observe(self, load: Load, now: float) -> None:
        """Two reports with a full batch all along tell how long a step takes. Between two with nothing in it what was
        told before fades."""
        if self.last and now - self.last.at < LEAST_SPAN:
            return
        before, self.last = self.last, Reported(now, load)
        if before is None:
            return
        if not load.running and not before.load.running:
            self.correction = self.correction.faded(now - before.at)
        if not (load.running and before.load.running and load.busy and before.load.busy):
            return
        steps = load.progress - before.load.progress
        if steps > 0:
            batch, tokens = (load.running + before.load.running) // 2, (load.kv_tokens + before.load.kv_tokens) // 2
            self.correction = self.correction.observed(self.published.seconds(batch, tokens), (now - before.at) / steps)


class LiveColumns:
    """One row a live request, dense: a removed row is replaced by the last."""

    def __init__(self) -> None:
        self.bookings: list[int] = []
        self.at: dict[int, int] = {}
        self.row = np.zeros(INITIAL, dtype=np.int64)
        self.joins, self.leaves, self.tokens = np.zeros(INITIAL), np.zeros(INITIAL), np.zeros(INITIAL)
        self.promised = np.zeros(INITIAL)

    def __len__(self) -> int:
        return len(self.bookings)

    def add(self, booking: int, row: int, joins: float, leaves: float, tokens: float, promised: float = np.inf) -> None:
        position = len(self.bookings)
        if position == len(self.row):
            self._grow()
        self.bookings.append(booking)
        self.at[booking] = position
        self.row[position], self.tokens[position] = row, tokens
        self.joins[position], self.leaves[position], self.promised[position] = joins, leaves, promised

    def remove(self, booking: int) -> bool:
        position = self.at.pop(booking, None)
        if position is None:
            return False
        last = self.bookings.pop()
        if last != booking:
            self.bookings[position], self.at[last] = last, position
            for column in (self.row, self.joins, self.leaves, self.tokens, self.promised):
                column[position] = column[len(self.bookings)]
        return True

    def _grow(self) -> None:
        size = 2 * len(self.row)
        self.row = np.resize(self.row, size)
        self.joins, self.leaves = np.resize(self.joins, size), np.resize(self.leaves, size)
        self.tokens, self.promised = np.resize(self.tokens, size), np.resize(self.promised, size)


class Decodes:
    """Seats by id, live requests in columns."""

    def __init__(self) -> None:
        self.seats: dict[str, DecodeSeat] = {}
        self.live = LiveColumns()
        self.tail = Tail()
        self._turns = 0
        self._rebuild()

    def put(self, id: str, model: DecodeModel) -> None:
        seat = self.seats.get(id)
        if seat is None:
            self.seats[id] = DecodeSeat(id, model)
        elif seat.published == model:
            return
        else:
            seat.published = model
        self._rebuild()

    def remove(self, id: str) -> None:
        if id not in self.seats:
            return
        row = self._row[id]
        for booking in [b for b in self.live.bookings if self.live.row[self.live.at[b]] == row]:
            self.live.remove(booking)
        del self.seats[id]
        count = len(self.live)
        self.live.row[:count] -= self.live.row[:count] > row
        self._rebuild()

    def set_open(self, id: str, open: bool) -> None:
        self.seats[id].open = open
        self._open[self._row[id]] = open

    def report(self, id: str, load: Load, now: float) -> None:
        """What is reported beyond our own joined requests belongs to others."""
        seat = self.seats[id]
        seat.running = max(0.0, float(load.running - len(seat.joined)))
        seat.kv_tokens = max(0.0, load.kv_tokens - sum(seat.joined.values()))
        if load.total_blocks:
            seat.total, seat.room = load.total_blocks, load.room_blocks
            seat.most = max(seat.most, seat.room)
        seat.limit = load.batch_limit or np.inf
        seat.observe(load, now)
        self._refresh(seat)

    def others(self, id: str, requests: int, blocks: int) -> None:
        """What conductors who are not heard have placed there that no report counts as running."""
        seat = self.seats[id]
        if (seat.coming, seat.coming_blocks) == (requests, blocks):
            return
        self._coming += blocks - seat.coming_blocks
        seat.coming, seat.coming_blocks = requests, blocks
        self._refresh(seat)

    def book(
        self,
        booking: int,
        id: str,
        blocks: int,
        joins: float,
        leaves: float,
        tokens: float,
        promised: float = np.inf,
    ) -> None:
        """``promised``: seconds that a step may take at most while it decodes."""
        seat = self.seats[id]
        self._turns += 1
        seat.turn = self._turns
        seat.unsettled[booking] = blocks
        seat.assigned += 1
        self.live.add(booking, self._row[id], joins, leaves, tokens, promised)
        self._refresh(seat)

    def settle(self, booking: int, id: str) -> None:
        seat = self.seats.get(id)
        if seat and booking in seat.unsettled:
            seat.settled[booking] = seat.unsettled.pop(booking)
            self._refresh(seat)

    def join(self, booking: int, now: float) -> None:
        """Its first token came: it decodes from now on, for as long as was expected."""
        at = self.live.at.get(booking)
        if at is not None:
            self.live.leaves[at] += now - self.live.joins[at]
            self.live.joins[at] = now
            self.seats[self.ids[self.live.row[at]]].joined[booking] = float(self.live.tokens[at])

    def echo(self, booking: int, id: str, blocks: int) -> None:
        """Other conductors, who cannot have heard of the booking yet, may be placing as much there: it is kept free
        until ``unecho``."""
        seat = self.seats[id]
        seat.echoes[booking] = blocks
        self._refresh(seat)

    def unecho(self, booking: int, id: str) -> None:
        seat = self.seats.get(id)
        if seat and seat.echoes.pop(booking, None) is not None:
            self._refresh(seat)

    def end(self, booking: int, id: str, gives_back: bool = True) -> None:
        self.unecho(booking, id)
        if self.live.remove(booking):
            seat = self.seats[id]
            seat.assigned -= 1
            seat.unsettled.pop(booking, None)
            seat.joined.pop(booking, None)
            held = seat.settled.pop(booking, 0)
            if gives_back:
                self._give_back(seat, held)
            self._refresh(seat)

    @staticmethod
    def _give_back(seat: DecodeSeat, blocks: int) -> None:
        """What ended has room again before the instance's next report says so; that report then has the last word."""
        if seat.room < seat.most:
            seat.room = min(seat.room + blocks, seat.most)

    def places(self, blocks: int) -> float:
        """How many requests of so many blocks all open instances together have room for. What exceeds an empty
        instance's promise gets all of it. Inf where no pool is that large: a decision says so."""
        fits = self._open & (self._total >= blocks)
        if not np.count_nonzero(fits):
            return math.inf
        found: float = np.maximum(self._room[fits] // np.minimum(self._most[fits], blocks), 0).sum(dtype=float)
        return found

    def view(self, now: float, closed: Collection[str], block_size: int = 1) -> DecodeView:
        live, count = self.live, len(self.live)
        return DecodeView(
            ids=self.ids,
            base=self._base,
            per_sequence=self._per_sequence,
            per_token=self._per_token,
            running=self._running,
            kv_tokens=self._kv_tokens + self._coming_blocks * float(block_size) if self._coming else self._kv_tokens,
            room=self._room,
            total=self._total,
            most=self._most,
            limit=self._limit,
            assigned=self._assigned,
            open=without(self._open, self._row, closed),
            turn=self._turn,
            live_row=live.row[:count],
            live_joins=live.joins[:count] - now,
            live_leaves=live.leaves[:count] - now,
            live_tokens=live.tokens[:count],
            live_promised=live.promised[:count],
            tail=self.tail.seconds(now),
        )

    def _refresh(self, seat: DecodeSeat) -> None:
        row, model = self._row[seat.id], seat.model
        self._base[row], self._per_sequence[row], self._per_token[row] = model.base, model.per_sequence, model.per_token
        self._most[row], self._limit[row] = seat.most or UNLIMITED, seat.limit
        self._running[row], self._kv_tokens[row] = seat.running + seat.coming, seat.kv_tokens
        self._room[row] = seat.room - sum(seat.unsettled.values()) - sum(seat.echoes.values())
        self._total[row], self._turn[row] = seat.total, seat.turn
        self._assigned[row], self._coming_blocks[row] = seat.assigned + seat.coming, seat.coming_blocks

    def _rebuild(self) -> None:
        seats = list(self.seats.values())
        size = len(seats)
        self.ids = tuple(seat.id for seat in seats)
        self._row = {id: row for row, id in enumerate(self.ids)}
        self._base, self._per_sequence, self._per_token = np.zeros(size), np.zeros(size), np.zeros(size)
        self._most, self._limit = np.zeros(size, dtype=np.int64), np.zeros(size)
        self._open = np.array([seat.open for seat in seats], dtype=np.bool_)
        self._running, self._kv_tokens = np.zeros(size), np.zeros(size)
        self._room, self._total = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self._turn, self._assigned = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self._coming_blocks = np.zeros(size, dtype=np.int64)
        self._coming = sum(seat.coming_blocks for seat in seats)
        for seat in seats:
            self._refresh(seat)
