"""From requests to slices on their way: runs of neighbours, the choice of a transport, the cut, the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.store.transfer.base import Request, Status
from services.store.transfer.batches import Batch, Job, Slice
from services.store.transfer.copier import Copier, read
from services.store.transfer.endpoint import Endpoint, Local
from services.store.transfer.express import Express
from services.store.transfer.link import Link
from services.store.transfer.metrics import IN_FLIGHT
from services.store.transfer.peers import Peers
from services.store.transfer.rdma.transport import Rdma
from services.store.transfer.routes import Route, Routes
from services.store.transfer.segments import Segments
from services.store.transfer.topology.slices import RUN, SLICE_CEILING, cut, slice_size
from services.store.transfer.wire import MAX_GRANT, MAX_LENGTH, MIB, check_name
from shared.errors import Fenced, InvalidInput, MooncakeError, OutOfRange, PeerGone
from shared.messages import Ref

AT_ONCE = MIB
"""Mapped READs of so many bytes are copied where they are submitted: that takes less than to tell a thread."""


class Dispatch:
    """``endpoints`` is where its parked jobs come back from, through ``assign``."""

    def __init__(self, local: Local, segments: Segments, routes: Routes, rdma: Rdma, cap: int) -> None:
        self._local = local
        self._lock = local.lock
        self._segments = segments
        self._routes = routes
        self._rdma = rdma
        self.peers = Peers(local, cap, self.assign)
        self.copier = Copier(local.lock, self.verify)
        self._express = Express(local.lock, segments, routes, self.peers)

    def submit(self, batch: Batch, requests: Sequence[Request]) -> list[Job]:
        """On the loop. Wrong requests become failed jobs. Raises InvalidInput when the batch has no room."""
        if batch.filled + len(requests) > batch.size:
            raise InvalidInput(f"batch {batch.number} has room for {batch.size} requests", field="requests")
        jobs = self._jobs(batch, requests)
        IN_FLIGHT.inc(len(requests))
        touched = {job.request.peer: self.peers.get(job.request.peer) for job in jobs if job.error is None}
        self._copy(self._begin_all(jobs, touched))
        for endpoint in touched.values():
            endpoint.mend()
        return jobs

    def express(self, batch: Batch, requests: Sequence[Request]) -> tuple[list[Job], bool | None]:
        """On the loop: small requests to one peer, to which nothing else is under way. Their jobs, and what became of
        them (see ``Express.carry``); where nothing has begun they have to be submitted, in another batch."""
        if len(requests) > RUN:  # each is answered for
            return [], None
        jobs = self._jobs(batch, requests)
        carried = self._express.carry(jobs)
        if carried is None:
            for job in jobs:
                job.mapping = None  # it would stay mapped until somebody collects the garbage
                if job.local is not None:
                    self._segments.let_go(job.local)
        return jobs, carried

    def expire(self, jobs: Sequence[Job], error: MooncakeError) -> None:
        """Give jobs up; they end as soon as nothing of them is in flight (``dest_held``)."""
        with self._lock:
            over = {job for job in jobs if job.status in (Status.WAITING, Status.PENDING)}
            for ref in {job.request.peer for job in over}:
                if (endpoint := self.peers.known(ref)) is not None:
                    endpoint.link.expire(over, error)
            self.copier.drop(over)
        self._rdma.expire(over, error)

    # -- requests to jobs ----------------------------------------------------------------------------------

    def _jobs(self, batch: Batch, requests: Sequence[Request]) -> list[Job]:
        jobs: list[Job] = []
        for request in requests:
            if jobs and jobs[-1].takes(request):
                batch.filled += 1
            else:
                jobs.append(self._job(batch, request))
        return jobs

    def _job(self, batch: Batch, request: Request) -> Job:
        """A job whose ``error`` is set where the request is wrong by itself."""
        try:
            segment = self._segments.use(request.local)
        except MooncakeError as e:
            return batch.add(request, None, e)
        job = batch.add(request, segment)
        try:
            segment.check(request.local_offset, request.length)
            _check_remote(request)
        except MooncakeError as e:
            job.error = e
        return job

    # -- jobs to slices ------------------------------------------------------------------------------------

    def _begin_all(self, jobs: Sequence[Job], touched: dict[Ref, Endpoint]) -> list[Slice]:
        """Send or park jobs; the slices to be copied at once."""
        at_once: list[Slice] = []
        with self._lock:
            for job in jobs:
                if job.error is None:
                    self._begin(touched[job.request.peer].link, job, at_once)
                else:
                    job.finish()
            for endpoint in touched.values():
                endpoint.link.rouse()
        return at_once

    def _begin(self, link: Link, job: Job, at_once: list[Slice]) -> None:
        if link.refuses(job):
            return job.finish(Fenced("the landing was fenced"))
        if link.peer is None or link.parked:
            return link.park(job)
        try:
            route = self._routes.now(link.peer, job, link.pullable)
        except MooncakeError as e:
            return job.finish(e)
        if route is None:
            link.park(job)
        elif route.mapping is not None and job.length + sum(piece.length for piece in at_once) <= AT_ONCE:
            at_once += self._cut(link, job, route)
        else:
            self._send(link, job, route, link.enqueue)

    async def assign(self, link: Link, job: Job) -> None:
        """Find the transport of a parked job."""
        assert link.peer is not None
        route, error = None, None
        try:
            route = await self._routes.find(self.peers.get(link.ref), link.peer, job, link.pullable)
        except MooncakeError as e:
            error = e
        with self._lock:
            if job not in link.parked:
                return  # it was given up meanwhile
            link.parked.remove(job)
            if route is None:
                job.finish(error)
            else:
                self._send(link, job, route, link.submit)

    def _send(self, link: Link, job: Job, route: Route, queue: Callable[[list[Slice]], None]) -> None:
        """Under the lock: queue the slices of a job."""
        if route.reach is not None:
            return self._rdma.send(link.ref, job, route.reach)
        slices = self._cut(link, job, route)
        if route.mapping is not None:
            self.copier.submit(slices)
        else:
            queue(slices)

    def _cut(self, link: Link, job: Job, route: Route) -> list[Slice]:
        """Under the lock. The job is under way from here on."""
        size = (
            SLICE_CEILING
            if route.transport == "shm"
            else slice_size(job.length, link.queued_bytes, self._local.streams)
        )
        pieces = cut(job.length, size, job.step)
        job.open = len(pieces)
        return route.slices(job, pieces)

    # -- mapped reads --------------------------------------------------------------------------------------

    def _copy(self, slices: Sequence[Slice]) -> None:
        for piece in slices:
            refused = read(piece)
            with self._lock:
                self.copier.settle(piece, refused)

    def verify(self, piece: Slice) -> None:
        """Under the lock, on whatever thread: the owner has the last word on a copied slice."""
        endpoint = self.peers.known(piece.job.request.peer)
        if endpoint is None:
            piece.settle(PeerGone("the peer is gone"))
        else:
            endpoint.link.submit([piece])
            endpoint.mend_soon()


def _check_remote(request: Request) -> None:
    """What no frame could say fails by itself, before it could take its neighbours along. Raises OutOfRange,
    InvalidInput."""
    if request.offset < 0 or request.offset + request.length > MAX_LENGTH:
        raise OutOfRange(f"[{request.offset}, +{request.length}) is in no segment")
    if not 0 <= request.grant <= MAX_GRANT:
        raise InvalidInput(f"a grant is 0 to {MAX_GRANT}, not {request.grant}", field="grant")
    check_name(request.segment)
