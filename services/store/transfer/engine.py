"""The transfer engine of an agent: registration, batches, calls; everything else is wired together here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from shared.errors import DeadlineExceeded, Fenced, InvalidInput, MooncakeError, NoTransport, OutOfRange, PeerGone
from shared.messages import Ref
from services.store.transfer.base import CallHandler, Guard, Op, OpenGuard, Peer, Request, Resolver, Result
from services.store.transfer.batches import Batch, BatchTable, Job, Slice, cut, slice_size
from services.store.transfer.endpoint import Endpoint, Local
from services.store.transfer.endpoints import EndpointPool
from services.store.transfer.handshake import Hello
from services.store.transfer.link import Link
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.segments import Memory, Segment, Segments
from services.store.transfer.server import Server
from services.store.transfer.wire import MAX_LENGTH, Kind, SegmentRef

AT_CAP = 0.02


class Engine:
    """Implements :class:`services.store.transfer.base.TransferEngine`.

    ``host`` and ``port``: where the data port listens (0: any free port, see ``peer``). ``advertise``: the host
    that others are told, ``host`` where empty. ``streams``: data connections to a peer at most; ``endpoints``: peers
    connected at most, idle ones beyond it are disconnected. ``connect_timeout`` bounds a connection attempt and a
    handshake, ``submit_timeout`` what ``submit_transfer`` started. Seconds.
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
        host_id: str = "",
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
        self._local = Local(ref, secret, resolve, host_id, "", connect_timeout, streams)
        self._lock = self._local.lock
        self._server = Server(ref, secret, self._segments, guard or OpenGuard(), self._map, on_call, connect_timeout)
        self._endpoints: dict[Ref, Endpoint] = {}
        self._pool: EndpointPool[Ref] = EndpointPool(endpoints)
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._port = self._server.start(*self._bind)

    def peer(self) -> Peer:
        """How others reach this agent; after ``start``."""
        return Peer(self.ref, self._advertise, self._port, self._local.host_id, self._local.shm)

    async def close(self) -> None:
        error = PeerGone("this agent is closing")
        for endpoint in list(self._endpoints.values()):
            await endpoint.close(error)
        await self._server.close()

    # -- memory ----------------------------------------------------------------------------------------------

    def register_local_memory(self, buffer: memoryview, location: str = "cpu:0", *, name: str, fd: int = -1) -> None:
        self._segments.register(Segment(name, buffer, location, fd))

    async def unregister_local_memory(self, name: str, timeout: float) -> None:
        """Raises DeadlineExceeded while transfers are in flight on it: it takes no new ones, ask again."""
        idle = asyncio.get_running_loop().create_future()
        segment = self._segments.retire(name, _teller(idle))
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
        return self._batches.result(batch, index)

    def free_batch(self, batch: int) -> None:
        self._batches.free(batch)

    async def transfer(self, requests: Sequence[Request], timeout: float) -> list[Result]:
        batch = self._batches.allocate(len(requests), self._finished)
        done = self._running().create_future()
        jobs = self._submit(batch, requests)
        self._watch(batch, _teller(done))
        try:
            await asyncio.wait({done}, timeout=timeout)
        finally:  # also when the caller was cancelled
            if not done.done():
                self._expire(jobs, f"not completed within {timeout:g} s")
                await _surely(done)
            self._batches.free(batch.number)
        return batch.results()

    def _submit(self, batch: Batch, requests: Sequence[Request]) -> list[Job]:
        if len(batch.jobs) + len(requests) > batch.size:
            raise InvalidInput(f"batch {batch.number} has room for {batch.size} requests", field="requests")
        jobs = [self._job(batch, request) for request in requests]
        touched = {job.request.peer for job in jobs if job.error is None}
        with self._lock:
            for job in jobs:
                if job.error is None:
                    self._begin(job)
                else:
                    job.finish()
        for ref in touched:
            self._endpoint(ref).mend()
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

    def _begin(self, job: Job) -> None:
        link = self._endpoint(job.request.peer).link
        if link.refuses(job):
            job.finish(Fenced("the landing was fenced"))
        elif link.peer is None or link.parked:
            link.park(job)
        elif (slices := self._assign_now(link, job)) is None:
            link.park(job)
        else:
            link.submit(slices)

    def _assign_now(self, link: Link, job: Job) -> list[Slice] | None:
        """The slices of a job, None where its transport is not known without waiting."""
        return self._over_tcp(job, link.queued_bytes)

    async def _assign(self, peer: Peer, job: Job) -> list[Slice]:
        """Choose the transport of a job and cut it. Raises NoTransport."""
        return self._over_tcp(job, 0)

    def _over_tcp(self, job: Job, queued: int) -> list[Slice]:
        request = job.request
        kind = Kind.READ if request.op is Op.READ else Kind.WRITE
        pieces = cut(request.length, slice_size(request.length, queued, self._local.streams))
        job.transport, job.open = "tcp", len(pieces)
        return [Slice(job, kind, at, length, SegmentRef(request.segment)) for at, length in pieces]

    def _expire(self, jobs: Sequence[Job], reason: str) -> None:
        with self._lock:
            for ref in {job.request.peer for job in jobs}:
                if ref in self._endpoints:
                    self._endpoints[ref].link.expire(jobs, DeadlineExceeded(reason))

    def _watch(self, batch: Batch, tell: Callable[[], None]) -> None:
        with self._lock:
            batch.when_finished(tell)

    def _finished(self, job: Job) -> None:
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
            forget = endpoint.link.ledger.when_drained(grants, _teller(done))
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
            endpoint = self._endpoints[ref] = Endpoint(ref, self._local, self._assign, self._room)
        self._pool.touch(ref)
        return endpoint

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
        raise NoTransport("no shared memory with this peer")


def _teller(future: asyncio.Future[None]) -> Callable[[], None]:
    """Sets a future from any thread."""
    loop = future.get_loop()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))

    return tell


async def _surely(future: asyncio.Future[None]) -> None:
    """Wait for what comes soon, whatever cancels us: memory may not be let go of before. Re-raises a cancellation."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
