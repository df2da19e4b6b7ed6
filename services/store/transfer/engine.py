"""The transfer engine of an agent: registration, batches, calls; everything else is wired together here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from services.store.transfer.base import (
    CallHandler,
    Generations,
    Guard,
    Op,
    OpenGuard,
    Peer,
    Request,
    Resolver,
    Result,
    Status,
)
from services.store.transfer.batches import SLICE_CEILING, Batch, BatchTable, Job, Slice, cut, slice_size
from services.store.transfer.copier import Copier, read
from services.store.transfer.endpoint import Endpoint, Local
from services.store.transfer.endpoints import EndpointPool
from services.store.transfer.handshake import Hello
from services.store.transfer.host import host_id as find_host_id
from services.store.transfer.link import Link
from services.store.transfer.mapping import Mappings
from services.store.transfer.metrics import IN_FLIGHT, finished
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.routes import Route, Routes
from services.store.transfer.segments import Memory, Segment, Segments
from services.store.transfer.server import Server
from services.store.transfer.sharing import Sharing
from services.store.transfer.threads import off_loop
from services.store.transfer.wake import surely, teller
from services.store.transfer.wire import KIB, MAX_LENGTH, Kind, SegmentRef
from shared.errors import (
    DeadlineExceeded,
    Fenced,
    InvalidInput,
    MooncakeError,
    NoTransport,
    NotRegistered,
    OutOfRange,
    PeerGone,
)
from shared.messages import Ref

AT_CAP = 0.02
AT_ONCE = 256 * KIB
KINDS = {
    (Op.READ, False): Kind.READ,
    (Op.WRITE, False): Kind.WRITE,
    (Op.READ, True): Kind.COPY,
    (Op.WRITE, True): Kind.PULL,
}


class Engine:
    """Implements :class:`services.store.transfer.base.TransferEngine`.

    ``host`` and ``port``: where the data port listens (0: any free port, see ``peer``). ``advertise``: the host
    that others are told, ``host`` where empty. ``shm``: the Unix socket where descriptors are passed (``@name`` or a
    path; empty: an abstract one of our own); ``host_id``: as :func:`host.host_id` finds it, "" to share no memory.
    ``streams``: data connections to a peer at most; ``endpoints``: peers connected at most, idle ones beyond it are
    disconnected. ``connect_timeout`` bounds a connection attempt and a handshake, ``submit_timeout`` what
    ``submit_transfer`` started. Seconds.
    """

    def __init__(
        self,
        ref: Ref,
        *,
        secret: bytes,
        resolve: Resolver,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        host_id: str | None = None,
        shm: str = "",
        policy: TransportPolicy | None = None,
        guard: Guard | None = None,
        on_call: CallHandler | None = None,
        connect_timeout: float = 3.0,
        submit_timeout: float = 30.0,
        streams: int = 2,
        endpoints: int = 256,
    ) -> None:
        self.ref = ref
        self._bind = (host, port)
        self._advertise = advertise or host
        self._policy = policy or TransportPolicy()
        self._submit_timeout = submit_timeout
        self._segments = Segments()
        self._batches = BatchTable()
        guard = guard or OpenGuard()
        identity = find_host_id() if host_id is None else host_id
        address = (shm or f"@mooncake-{ref.id}-{ref.incarnation:x}") if identity else ""
        self._local = Local(
            ref, secret, resolve, identity, address, connect_timeout, streams, "tcp" in self._policy.order
        )
        self._lock = self._local.lock
        self._mappings = Mappings(ref, secret, connect_timeout)
        self._routes = Routes(self._policy, self._mappings, identity)
        self._copier = Copier(self._lock, self._verify)
        self._sharing = Sharing(ref, secret, self._segments, type(guard) is OpenGuard, connect_timeout)
        self._server = Server(ref, secret, self._segments, guard, self._map, on_call, connect_timeout)
        self._endpoints: dict[Ref, Endpoint] = {}
        self._pool: EndpointPool[Ref] = EndpointPool(endpoints)
        self._port = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._mappings.start()
        if self._local.shm:
            self._sharing.start(self._local.shm)
        self._port = self._server.start(*self._bind)

    def peer(self) -> Peer:
        """How others reach this agent; after ``start``."""
        return Peer(self.ref, self._advertise, self._port, self._local.host_id, self._local.shm)

    async def close(self) -> None:
        """Idempotent. What is under way fails with PeerGone."""
        if self._closed:
            return
        self._closed = True
        error = PeerGone("this agent is closing")
        if (thread := self._copier.close(error)) is not None:
            await off_loop(thread.join, "transfer-join", lambda _: None)
        for endpoint in list(self._endpoints.values()):
            await endpoint.close(error)
        await self._server.close()
        self._sharing.close()
        self._mappings.close()

    # -- memory ----------------------------------------------------------------------------------------------

    def register_local_memory(
        self,
        buffer: memoryview,
        location: str = "cpu:0",
        *,
        name: str,
        fd: int = -1,
        fd_offset: int = 0,
        generations: Generations | None = None,
    ) -> None:
        segment = Segment(name, buffer, location, fd, fd_offset, generations)
        self._segments.register(segment)
        if fd >= 0:
            self._sharing.shares(segment)

    async def unregister_local_memory(self, name: str, timeout: float) -> None:
        """Raises DeadlineExceeded while transfers are in flight on it: it takes no new ones, ask again."""
        idle = asyncio.get_running_loop().create_future()
        segment = self._segments.retire(name, teller(idle))
        self._sharing.withdraws(segment)
        if not (await asyncio.wait({idle}, timeout=timeout))[0]:
            raise DeadlineExceeded(f"segment {name} is in use by {segment.users} transfers")
        self._segments.forget(segment)

    # -- the paper's calls ------------------------------------------------------------------------------------

    def allocate_batch(self, size: int) -> int:
        return self._batches.allocate(size, self._finished).number

    def submit_transfer(self, batch: int, requests: Sequence[Request]) -> None:
        jobs = self._submit(self._batches.get(batch), requests)
        timer = self._running().call_later(self._submit_timeout, self._expire, jobs, "no completion in time")
        self._watch(self._batches.get(batch), timer.cancel)

    def get_transfer_status(self, batch: int, index: int) -> Result:
        return self._batches.get(batch).result(index)

    def free_batch(self, batch: int) -> None:
        self._batches.free(batch)

    async def transfer(self, requests: Sequence[Request], timeout: float) -> list[Result]:
        loop = self._running()
        batch = self._batches.allocate(len(requests), self._finished)
        jobs = self._submit(batch, requests)
        timer = loop.call_later(timeout, self._expire, jobs, f"not completed within {timeout:g} s")
        try:
            await self._end(batch)
        except asyncio.CancelledError:
            self._expire(jobs, "the transfer was cancelled")
            await surely(self._end(batch))
            raise
        finally:
            timer.cancel()
            if not batch.unfinished:
                self._batches.free(batch.number)
        return batch.results()

    def _end(self, batch: Batch) -> asyncio.Future[None]:
        done = self._running().create_future()
        self._watch(batch, teller(done))
        return done

    def _submit(self, batch: Batch, requests: Sequence[Request]) -> list[Job]:
        if batch.filled + len(requests) > batch.size:
            raise InvalidInput(f"batch {batch.number} has room for {batch.size} requests", field="requests")
        jobs = self._jobs(batch, requests)
        IN_FLIGHT.inc(len(requests))
        touched = {job.request.peer: self._endpoint(job.request.peer) for job in jobs if job.error is None}
        at_once: list[Slice] = []
        with self._lock:
            for job in jobs:
                if job.error is None:
                    self._begin(job, at_once)
                else:
                    job.finish()
        for piece in at_once:
            refused = read(piece)
            with self._lock:
                self._copier.settle(piece, refused)
        for endpoint in touched.values():
            endpoint.mend()
        return jobs

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
            if request.offset < 0 or request.offset + request.length > MAX_LENGTH:
                raise OutOfRange(f"[{request.offset}, +{request.length}) is in no segment")
        except MooncakeError as e:
            job.error = e
        return job

    def _begin(self, job: Job, at_once: list[Slice]) -> None:
        """Under the lock: on its way, or parked until its peer and transport are known. Small mapped READs are added to
        ``at_once``: to copy them takes less than to tell a thread."""
        link = self._endpoint(job.request.peer).link
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
            self._send(link, job, route)

    async def _assign(self, link: Link, job: Job) -> None:
        """Find the transport of a parked job."""
        assert link.peer is not None
        route, error = None, None
        try:
            route = await self._routes.find(link.peer, job, link.pullable)
        except MooncakeError as e:
            error = e
        with self._lock:
            if job not in link.parked:
                return  # it was given up meanwhile
            link.parked.remove(job)
            if route is None:
                job.finish(error)
            else:
                self._send(link, job, route)

    def _send(self, link: Link, job: Job, route: Route) -> None:
        """Under the lock: queue the slices of a job."""
        slices = self._cut(link, job, route)
        if route.mapping is not None:
            self._copier.submit(slices)
        else:
            link.submit(slices)

    def _cut(self, link: Link, job: Job, route: Route) -> list[Slice]:
        """Under the lock. The job is under way from here on."""
        request, mapped = job.request, route.transport == "shm"
        size = SLICE_CEILING if mapped else slice_size(job.length, link.queued_bytes, self._local.streams)
        pieces = cut(job.length, size, job.step)
        job.transport, job.mapping, job.open = route.transport, route.mapping, len(pieces)
        kind = KINDS[request.op, mapped]
        target = SegmentRef(request.segment, route.mapping.shape.instance if route.mapping else 0)
        slices = [Slice(job, kind, at, length, target) for at, length in pieces]
        if kind is Kind.PULL and job.local is not None:
            for piece in slices:
                piece.source = SegmentRef(job.local.name, job.local.instance)
        return slices

    def _verify(self, piece: Slice) -> None:
        """Under the lock, on the copier's thread: the owner has the last word."""
        endpoint = self._endpoints[piece.job.request.peer]
        endpoint.link.submit([piece])
        with suppress(RuntimeError):  # the loop is closed
            self._running().call_soon_threadsafe(endpoint.mend)

    def _expire(self, jobs: Sequence[Job], reason: str) -> None:
        with self._lock:
            over = {job for job in jobs if job.status in (Status.WAITING, Status.PENDING)}
            for ref in {job.request.peer for job in over}:
                if ref in self._endpoints:
                    self._endpoints[ref].link.expire(over, DeadlineExceeded(reason))
            self._copier.drop(over)

    def _watch(self, batch: Batch, tell: Callable[[], None]) -> None:
        with self._lock:
            batch.when_finished(tell)

    def _finished(self, job: Job) -> None:
        job.mapping = None
        finished(job)
        IN_FLIGHT.dec(job.count)
        if job.local is not None:
            self._segments.let_go(job.local)

    # -- agents talking ---------------------------------------------------------------------------------------

    async def call(self, peer: Ref, payload: bytes, timeout: float) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                control = await self._endpoint(peer).control()
                return await control.call(payload, timeout)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout:g} s") from None

    def refuse_grants(self, peer: Ref, grants: Iterable[int]) -> None:
        with self._lock:
            self._endpoint(peer).link.refuse(grants)

    async def drained(self, peer: Ref, grants: Iterable[int], timeout: float) -> bool:
        done = self._running().create_future()
        endpoint = self._endpoint(peer)
        with self._lock:
            forget = endpoint.link.ledger.when_drained(grants, teller(done))
        endpoint.mend()  # what a broken stream left is reaped
        await asyncio.wait({done}, timeout=timeout)
        with self._lock:
            forget()
        return done.done()

    async def destroy_endpoints(self, peer: Ref) -> None:
        await self._server.destroy(lambda greeting: greeting.me == peer)

    # -- peers --------------------------------------------------------------------------------------------------

    def _endpoint(self, ref: Ref) -> Endpoint:
        """Made on first use; not connected yet. On the loop."""
        endpoint = self._endpoints.get(ref)
        if endpoint is None:
            self._bury(ref)
            endpoint = self._endpoints[ref] = Endpoint(ref, self._local, self._assign, self._room)
        self._pool.touch(ref)
        return endpoint

    def _bury(self, ref: Ref) -> None:
        """Forget earlier incarnations of a peer, as far as nothing is under way to them."""
        for old in [old for old in self._endpoints if old.id == ref.id and not self._endpoints[old].busy()]:
            self._endpoints.pop(old).disconnect()
            self._pool.remove(old)

    async def _room(self, endpoint: Endpoint) -> None:
        """Admit an endpoint to the pool, disconnecting an idle one where the cap asks for it."""
        while True:
            admitted, victim = self._pool.admit(endpoint.ref, lambda ref: self._endpoints[ref].busy())
            if victim is not None:
                self._endpoints[victim].disconnect()
            if admitted:
                return
            await asyncio.sleep(AT_CAP)

    def connections(self) -> int:
        """Open connections, both ways."""
        return self._server.connections() + sum(endpoint.connections() for endpoint in self._endpoints.values())

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise InvalidInput("the engine was not started")
        return self._loop

    def _map(self, greeting: Hello, source: SegmentRef) -> Memory:
        """A peer's segment that it wants pulled. Raises NoTransport, NotRegistered."""
        if not self._local.host_id or greeting.host_id != self._local.host_id:
            raise NoTransport("the writer's memory is not on this host")
        try:
            return self._mappings.get(greeting.me, greeting.shm, source.name, source.instance)
        except NotRegistered:
            raise
        except MooncakeError as e:
            raise NoTransport(f"the writer's segment cannot be mapped: {e.message}") from e
