"""The connections to one peer: data streams and the control stream, made on first use and made again when they
break."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from services.store.transfer.base import Resolver
from services.store.transfer.batches import Job
from services.store.transfer.control import Caller, attach
from services.store.transfer.handshake import Role, hello, initiate
from services.store.transfer.link import FRAME_BYTES, Link
from services.store.transfer.metrics import INITIATOR
from services.store.transfer.sockets import block, connect
from services.store.transfer.stream import Stream
from services.store.transfer.threads import off_loop
from services.store.transfer.tls import Tls
from shared.errors import InternalError, MooncakeError, PeerGone, PeerRefused, ProtocolError, StaleIncarnation
from shared.messages import Ref
from shared.telemetry import log

TRIES = 3
BACK_OFF = 0.05


@dataclass
class Local:
    """What every endpoint of an agent needs to know of the agent."""

    ref: Ref
    secret: bytes
    resolve: Resolver
    host_id: str
    shm: str
    timeout: float
    streams: int
    push: bool
    tls: Tls | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


Shaken = tuple[socket.socket, list[int] | None]
Assign = Callable[[Link, Job], Awaitable[None]]
Room = Callable[["Endpoint"], Awaitable[None]]


class Endpoint:
    """Towards one incarnation of a peer. Lives on the loop, except where the lock is named. ``over``: the peer was
    found to be another incarnation now."""

    def __init__(self, ref: Ref, local: Local, assign: Assign, room: Room) -> None:
        self.ref = ref
        self.link = Link(ref, local.lock, local.push)
        self._local = local
        self._assign_job = assign
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._streams: set[Stream] = set()
        self._control: Caller | None = None
        self._connecting = asyncio.Lock()
        self._mending: asyncio.Task[None] | None = None
        self._closed = False
        self.over = False

    def connections(self) -> int:
        return len(self._streams) + (self._control is not None and not self._control.closed)

    def busy(self) -> bool:
        calling = self._control is not None and self._control.asking
        mending = self._mending is not None and not self._mending.done()
        return calling or mending or self._connecting.locked() or self.link.under_way()

    # -- keeping it going -------------------------------------------------------------------------------------

    def mend(self) -> None:
        """See to it that what is queued can move."""
        if not self._closed and (self._mending is None or self._mending.done()) and self._next_step() is not None:
            self._mending = self._loop.create_task(self._mend())

    async def _mend(self) -> None:
        tries = 0
        while (step := self._next_step()) is not None:
            try:
                await step()
                tries = 0
            except (MooncakeError, OSError) as e:  # OSError: no descriptors are left, say
                error = e if isinstance(e, MooncakeError) else PeerGone(f"cannot connect: {e}")
                tries += 1
                if tries >= TRIES or isinstance(e, (StaleIncarnation, PeerRefused, ProtocolError)):
                    return self._give_up(error)
                await asyncio.sleep(BACK_OFF * 2**tries)
            except Exception as e:  # a bug here must not leave requests waiting for their deadline
                log("transfer").exception("mending failed", peer=self.ref.id)
                return self._give_up(InternalError(f"connecting failed: {e!r}"))

    def _next_step(self) -> Callable[[], Awaitable[None]] | None:
        link = self.link
        if link.peer is None and (link.parked or link.queue):
            return self._resolve
        if link.parked:  # read without the lock: who changes it from a thread calls for mending afterwards
            return self._assign
        if link.unreaped:
            return self._reap
        wanted = min(self._local.streams, 1 + link.queued_bytes // FRAME_BYTES)
        return self._connect if link.queue and len(self._streams) < wanted else None

    def _give_up(self, error: MooncakeError) -> None:
        with self._local.lock:
            if self._streams and not self.link.parked and not self.link.unreaped:
                return  # only a further stream could not be had
            self.link.fail(error)
            self.link.peer = None  # it may be known under another address by now
            if isinstance(error, StaleIncarnation):
                self.over = True
                self.link.bury()

    async def _resolve(self) -> None:
        peer = await self._local.resolve(self.ref.id)
        if peer.ref != self.ref:
            raise StaleIncarnation(f"{self.ref.id} is incarnation {peer.ref.incarnation:x} now")
        self.link.peer = peer

    async def _assign(self) -> None:
        with self._local.lock:
            job = self.link.parked[0] if self.link.parked else None
        if job is None:
            return
        await self._assign_job(self.link, job)

    async def _reap(self) -> None:
        """Rule: all_completions. What a broken stream had sent counts as in flight until the target let go of it."""
        with self._local.lock:
            streams = list(self.link.unreaped)
        control = await self.control()
        await control.reap(streams, self._local.timeout)
        with self._local.lock:
            for stream in streams:
                self.link.reaped(stream)

    # -- connecting -------------------------------------------------------------------------------------------

    async def control(self) -> Caller:
        """The open control stream. Raises PeerGone, PeerRefused, StaleIncarnation, DeadlineExceeded."""
        async with self._connecting:
            if self._closed:
                raise PeerGone("this agent is closing")
            if self._control is None or self._control.closed:
                if self.link.peer is None:
                    await self._resolve()
                await self._room(self)
                shaken = await off_loop(lambda: self._shake(Role.CONTROL, 0), "transfer-connect", _drop)
                self._control = Caller()
                await attach(shaken[0], self._control)
            return self._control

    async def _connect(self) -> None:
        await self._room(self)
        number = secrets.randbits(63)
        with self._local.lock:
            known = self.link.grants()
        sock, live = await off_loop(lambda: self._shake(Role.DATA, number), "transfer-connect", _drop)
        try:
            block(sock)
            stream = Stream(self.link, sock, number, self._ended)
        except OSError:
            sock.close()
            raise
        with self._local.lock:
            self.link.judge(known, live)
            self.link.join(stream)
        self._streams.add(stream)
        INITIATOR.inc()
        stream.begin()

    def _shake(self, role: Role, number: int) -> Shaken:
        peer, local = self.link.peer, self._local
        assert peer is not None
        deadline = time.monotonic() + local.timeout
        sock = connect(peer.host, peer.port, local.timeout)
        try:
            if local.tls is not None:
                sock = local.tls.initiate(sock, max(0.001, deadline - time.monotonic()))
            greeting = hello(role, local.ref, self.ref, number, local.host_id, local.shm)
            return sock, initiate(sock, local.secret, greeting, deadline - time.monotonic()).grants
        except BaseException:
            sock.close()
            raise

    def _ended(self, stream: Stream, error: MooncakeError) -> None:
        """On the stream's thread."""
        with self._local.lock:
            self.link.lost(stream, error)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._forget, stream)

    def mend_soon(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.mend)

    def _forget(self, stream: Stream) -> None:
        INITIATOR.dec()
        self._streams.discard(stream)
        self.mend()

    def disconnect(self) -> None:
        """Drop the connections; they are made again when needed."""
        with self._local.lock:
            for stream in self._streams:
                stream.destroy()
        if self._control is not None:
            self._control.abort()
            self._control = None

    async def close(self, error: MooncakeError) -> None:
        """Fail what is under way and wait until no stream touches memory any more."""
        self._closed = True
        if self._mending is not None:
            self._mending.cancel()
        streams = list(self._streams)
        self.disconnect()
        with self._local.lock:
            self.link.fail(error)
            for carried in self.link.carried.values():
                for piece in carried:
                    piece.job.error = piece.job.error or error
        for stream in streams:
            await off_loop(stream.thread.join, "transfer-join", lambda _: None)


def _drop(shaken: Shaken) -> None:
    shaken[0].close()
