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
    """Lives on the loop."""

    def __init__(self, lock: threading.Lock, segments: Segments, routes: Routes, peers: Peers) -> None:
        self._lock = lock
        self._segments = segments
        self._routes = routes
        self._peers = peers

    def carry(self, jobs: Sequence[Job]) -> bool | None:
        """New jobs, all to one peer. True: they are COMPLETED and counted, their memory was let go of. False: they are
        under way, on the thread of a stream. None: nothing has begun, somebody else has to find out what is in the
        way."""
        endpoint = self._peers.get(jobs[0].request.peer)
        slices = self._slices(endpoint.link, jobs) if len(jobs) <= FRAME_SLICES else None
        if not slices:
            return None
        carried = self._copied(slices) if slices[0].kind is Kind.COPY else self._sent(endpoint.link, slices)
        if carried:
            for job in jobs:
                job.status, job.moved, job.mapping = Status.COMPLETED, job.length, None
                finished(job)
                if job.local is not None:
                    self._segments.let_go(job.local)
        return carried

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

    def _copied(self, slices: Sequence[Slice]) -> bool | None:
        """One that is refused is read again, to say why."""
        if any(piece.job.mapping is None or piece.job.mapping.asks for piece in slices):
            return None
        return None if any(read(piece) for piece in slices) else True

    def _sent(self, link: Link, slices: list[Slice]) -> bool | None:
        with self._lock:
            carrier = link.lend()
        if carrier is None:
            return None
        IN_FLIGHT.inc(count := sum(piece.job.count for piece in slices))
        done = carrier.carry(slices)
        if done:
            IN_FLIGHT.dec(count)
        return done
