"""Small transfers are carried to their end where they are asked for: no queue, no other thread, no news to wait for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from services.store.transfer.base import Status
from services.store.transfer.batches import Job, Slice
from services.store.transfer.copier import read
from services.store.transfer.link import FRAME_SLICES, Link
from services.store.transfer.metrics import IN_FLIGHT, finished
from services.store.transfer.peers import Peers
from services.store.transfer.routes import Routes
from services.store.transfer.segments import Segments
from services.store.transfer.wire import MIB, Kind
from shared.errors import MooncakeError

HERE = MIB
ALONE = 4 * MIB
"""Bytes of a transfer that the loop can spare the time for: telling a thread and hearing of it takes longer. More where
nobody else asks at the same time: streams carry several large ones better than one after the other."""


class Express:
    """Lives on the loop. ``carry`` is for jobs that are new, to one peer, and of ``HERE`` bytes at most together. It
    leaves them COMPLETED and counted, their memory let go of; PENDING, under way on the thread of a stream; or WAITING,
    where somebody else has to find out what is in the way."""

    def __init__(self, lock: threading.Lock, segments: Segments, routes: Routes, peers: Peers) -> None:
        self._lock = lock
        self._segments = segments
        self._routes = routes
        self._peers = peers

    def carry(self, jobs: Sequence[Job]) -> None:
        endpoint = self._peers.get(jobs[0].request.peer)
        slices = self._slices(endpoint.link, jobs) if len(jobs) <= FRAME_SLICES else None
        if not slices:
            return
        moved = self._copied(slices) if slices[0].kind is Kind.COPY else self._sent(endpoint.link, slices)
        if moved:
            for job in jobs:
                job.status, job.moved, job.mapping = Status.COMPLETED, job.length, None
                finished(job)
                if job.local is not None:
                    self._segments.let_go(job.local)

    def _slices(self, link: Link, jobs: Sequence[Job]) -> list[Slice] | None:
        """One for each job, all of one kind; None where that cannot be or may not be sent."""
        if link.peer is None or link.parked:
            return None
        slices: list[Slice] = []
        for job in jobs:
            if job.error is not None or link.refuses(job):
                return None
            try:
                route = self._routes.now(link.peer, job, link.pullable)
            except MooncakeError:
                return None
            if route is None or route.reach is not None:
                return None
            slices += route.slices(job, [(0, job.length)])
            if slices[-1].kind is not slices[0].kind:
                return None
        return slices

    def _copied(self, slices: Sequence[Slice]) -> bool:
        if any(piece.job.mapping is None or piece.job.mapping.asks for piece in slices):
            return False
        return not any(read(piece) for piece in slices)

    def _sent(self, link: Link, slices: list[Slice]) -> bool:
        with self._lock:
            carrier = link.lend()
        if carrier is None:
            return False
        done = carrier.carry(slices)
        if not done:
            IN_FLIGHT.inc(sum(piece.job.count for piece in slices))
        return done
