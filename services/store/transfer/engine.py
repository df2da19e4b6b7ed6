"""The transfer engine of an agent: registration, batches, calls; everything else is wired together here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from services.store.transfer.base import (
    CallHandler,
    Generations,
    Guard,
    OpenGuard,
    Peer,
    Request,
    Resolver,
    Result,
    Status,
)
from services.store.transfer.batches import Batch, BatchTable, Job, Slice
from services.store.transfer.dispatch import Dispatch
from services.store.transfer.endpoint import Endpoint, Local
from services.store.transfer.express import ALONE, HERE
from services.store.transfer.handshake import Hello
from services.store.transfer.host import host_id as find_host_id
from services.store.transfer.limits import Limits
from services.store.transfer.mapping import Mappings
from services.store.transfer.metrics import IN_FLIGHT, finished
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.rdma.messages import is_ours
from services.store.transfer.rdma.transport import Rdma
from services.store.transfer.room import Rooms, sizes
from services.store.transfer.routes import Routes
from services.store.transfer.segments import Memory, Segment, Segments
from services.store.transfer.server import Server
from services.store.transfer.sharing import Sharing
from services.store.transfer.threads import off_loop
from services.store.transfer.tls import Tls
from services.store.transfer.topology.matrix import Matrix
from services.store.transfer.wake import teller
from services.store.transfer.wire import SegmentRef
from shared.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    MooncakeError,
    NoTransport,
    NotRegistered,
    PeerGone,
    ProtocolError,
)
from shared.messages import Ref
from shared.records import NicRecord
from shared.tasks import settle
from shared.telemetry import log

SHARE = 0.001
"""Seconds after which transfers that end at once give others on the loop their turn."""


class Engine:
    """Implements :class:`services.store.transfer.base.TransferEngine`.

    ``host`` and ``port``: where the data port listens (0: any free port, see ``peer``). ``advertise``: the host
    that others are told, ``host`` where empty. ``shm``: the Unix socket where descriptors are passed (``@name`` or a
    path; empty: an abstract one of our own); ``host_id``: as :func:`host.host_id` finds it, "" to share no memory.
    ``streams``: data connections to a peer at most; ``endpoints``: peers connected at most, idle ones beyond it are
    disconnected. ``rdma_devices``: those to use where the policy names rdma, all where empty; ``topology``: which NICs
    are near which memory, as discovered where None. ``connect_timeout`` bounds a connection attempt and a
    handshake, ``submit_timeout`` what ``submit_transfer`` started. Seconds. ``limits``: see there.
    ``tls``: every connection to and from the data port is TLS.
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
        limits: Limits | None = None,
        tls: Tls | None = None,
        rdma_devices: Sequence[str] = (),
        topology: Matrix | None = None,
    ) -> None:
        self.ref = ref
        self._bind = (host, port)
        self._advertise = advertise or host
        policy = policy or TransportPolicy()
        self._submit_timeout = submit_timeout
        self._segments = Segments()
        self._batches = BatchTable()
        limits = limits or Limits()
        self._rooms = Rooms(limits.queued)
        guard = guard or OpenGuard()
        identity = find_host_id() if host_id is None else host_id
        address = (shm or f"@mooncake-{ref.id}-{ref.incarnation:x}") if identity else ""
        push = "tcp" in policy.order
        self._local = Local(ref, secret, resolve, identity, address, connect_timeout, streams, push, tls)
        self._lock = self._local.lock
        self._mappings = Mappings(ref, secret, connect_timeout)
        self._policy = policy
        self._rdma = Rdma(rdma_devices, topology, guard, connect_timeout, endpoints, self._ask_owner, self._endpoint)
        routes = Routes(policy, self._mappings, identity, self._rdma)
        self._dispatch = Dispatch(self._local, self._segments, routes, self._rdma, endpoints)
        self._sharing = Sharing(ref, secret, self._segments, type(guard) is OpenGuard, connect_timeout)
        self._server = Server(ref, secret, self._segments, guard, self._map, self._answer, connect_timeout, limits, tls)
        self._on_call = on_call
        self._port = 0
        self._closed = False
        self._yield_at = 0.0
        self._yielding = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError, also where RDMA is required and cannot be had."""
        self._loop = asyncio.get_running_loop()
        if "rdma" in self._policy.order:
            self._start_rdma()
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
        if (thread := self._dispatch.copier.close(error)) is not None:
            await off_loop(thread.join, "transfer-join", lambda _: None)
        await self._dispatch.peers.close(error)
        await self._rdma.close(error)
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
            try:
                self._sharing.shares(segment)
            except NoTransport:
                self._segments.forget(segment)
                raise
        if "rdma" in self._policy.order:
            self._rdma.add(segment)

    async def unregister_local_memory(self, name: str, timeout: float) -> None:
        """Raises DeadlineExceeded while transfers are in flight on it: it takes no new ones, ask again."""
        idle = asyncio.get_running_loop().create_future()
        segment = self._segments.retire(name, teller(idle))
        self._sharing.withdraws(segment)
        if not (await asyncio.wait({idle}, timeout=timeout))[0]:
            raise DeadlineExceeded(f"segment {name} is in use by {segment.users} transfers")
        await self._rdma.remove(segment)
        self._segments.forget(segment)

    # -- the paper's calls ------------------------------------------------------------------------------------

    def allocate_batch(self, size: int) -> int:
        return self._batches.allocate(size, self._finished).number

    def submit_transfer(self, batch: int, requests: Sequence[Request]) -> None:
        """Raises Contended where a peer's queue has no room for all of them: nothing was submitted then."""
        loop, taken = self._running(), sizes(requests)
        self._rooms.take_now(taken)
        try:
            jobs = self._dispatch.submit(self._batches.get(batch), requests)
        except InvalidInput:
            self._rooms.give(taken)
            raise
        timer = loop.call_later(self._submit_timeout, self._expire, jobs, "no completion in time")
        ended: asyncio.Future[None] = loop.create_future()
        ended.add_done_callback(lambda _: timer.cancel())
        ended.add_done_callback(lambda _: self._rooms.give(taken))
        self._watch(self._batches.get(batch), teller(ended))

    def get_transfer_status(self, batch: int, index: int) -> Result:
        return self._batches.get(batch).result(index)

    def free_batch(self, batch: int) -> None:
        self._batches.free(batch)

    async def transfer(self, requests: Sequence[Request], timeout: float) -> list[Result]:
        began, taken, loop = time.monotonic(), sizes(requests), self._running()
        batch = Batch(0, len(requests), self._finished)
        jobs: list[Job] = []
        carried: bool | None = None
        most = HERE if self._yielding else ALONE  # somebody who yields now would ask again at the same time
        if len(taken) == 1 and sum(taken.values()) <= most and self._rooms.unused(taken):
            jobs, carried = self._dispatch.express(batch, requests)
        if carried:
            await self._yield()
            return batch.results()
        try:
            await self._rooms.take(taken, timeout)  # at once, where something is under way
        except DeadlineExceeded as e:
            return [Result(Status.FAILED, error=e) for _ in requests]
        try:
            if carried is None:
                batch = Batch(0, len(requests), self._finished)
                jobs = self._dispatch.submit(batch, requests)
            left = timeout - (time.monotonic() - began)
            timer = loop.call_later(left, self._expire, jobs, f"not completed within {timeout:g} s")
            try:
                await self._ended(batch, jobs)
            finally:
                timer.cancel()
        finally:
            self._rooms.give(taken)
        return batch.results()

    async def _ended(self, batch: Batch, jobs: Sequence[Job]) -> None:
        """Nothing of ``jobs`` is in flight any more, not even where this raises CancelledError."""
        if not batch.unfinished:
            return await self._yield()
        try:
            await self._end(batch)
        except asyncio.CancelledError:
            self._expire(jobs, "the transfer was cancelled")
            await settle(self._end(batch))
            raise

    async def _yield(self) -> None:
        """Whoever asks again and again, and is answered at once, does not starve the loop."""
        if time.monotonic() > self._yield_at:
            self._yielding += 1
            try:
                await asyncio.sleep(0)
            finally:
                self._yielding -= 1
            self._yield_at = time.monotonic() + SHARE

    def _end(self, batch: Batch) -> asyncio.Future[None]:
        done = self._running().create_future()
        self._watch(batch, teller(done))
        return done

    def _expire(self, jobs: Sequence[Job], reason: str) -> None:
        self._dispatch.expire(jobs, DeadlineExceeded(reason))

    def _watch(self, batch: Batch, tell: Callable[[], None]) -> None:
        with self._lock:
            batch.when_finished(tell)

    def _finished(self, job: Job) -> None:
        job.mapping = None
        self._rdma.finished(job)
        finished(job)
        IN_FLIGHT.dec(job.count)
        if job.local is not None:
            self._segments.let_go(job.local)

    # -- agents talking ---------------------------------------------------------------------------------------

    async def call(self, peer: Ref, payload: bytes, timeout: float) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                control = await self._dispatch.peers.get(peer).control()
                return await control.call(payload, timeout)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout:g} s") from None

    def refuse_grants(self, peer: Ref, grants: Iterable[int]) -> None:
        with self._lock:
            self._dispatch.peers.get(peer).link.refuse(grants)
            self._rdma.refuse(peer, grants)

    async def drained(self, peer: Ref, grants: Iterable[int], timeout: float) -> bool:
        done = self._running().create_future()
        endpoint = self._dispatch.peers.get(peer)
        with self._lock:
            forget = endpoint.link.ledger.when_drained(grants, teller(done))
        endpoint.mend()  # what a broken stream left is reaped
        self._rdma.drain(peer)
        await asyncio.wait({done}, timeout=timeout)
        with self._lock:
            forget()
        return done.done()

    async def destroy_endpoints(self, peer: Ref) -> None:
        self._rdma.destroy(peer)
        await self._server.destroy(lambda greeting: greeting.me == peer)

    def connections(self) -> int:
        """Open connections, both ways."""
        return self._server.connections() + self._dispatch.peers.connections()

    def nics(self) -> list[NicRecord]:
        """The RDMA devices in use."""
        return self._rdma.nics()

    def registered(self) -> tuple[int, int]:
        """(bytes registered for RDMA, bytes to register); (0, 0) without RDMA."""
        return self._rdma.registered()

    def _answer(self, peer: Ref, payload: bytes) -> Awaitable[bytes] | bytes:
        """A call of a peer: about RDMA, or for whoever owns this engine."""
        if is_ours(payload):
            return self._rdma.answer(peer, payload)
        if self._on_call is None:
            raise ProtocolError("this agent answers no calls")
        return self._on_call(peer, payload)

    def _ask_owner(self, piece: Slice) -> None:
        self._dispatch.verify(piece)

    def _endpoint(self, peer: Ref) -> Endpoint:
        return self._dispatch.peers.get(peer)

    def _start_rdma(self) -> None:
        """Where it is not required it may be missing: that is logged, and counted where another transport is taken."""
        try:
            self._rdma.start()
        except (ConfigError, NoTransport) as e:
            if self._policy.require:
                raise ConfigError(f"transports is require:rdma, but {e.message}", field="transports") from e
            log("transfer").warning("there is no RDMA here", why=e.message)

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
