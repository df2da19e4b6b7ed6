"""The target's side of the data port: accepts connections, shakes hands on a thread each, keeps what was admitted."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from services.store.transfer.acceptor import Acceptor
from services.store.transfer.base import CallHandler, Guard
from services.store.transfer.control import Callee, attach
from services.store.transfer.handshake import Hello, Role, respond
from services.store.transfer.limits import Limits
from services.store.transfer.metrics import CUT_OFF, REFUSED_PEERS, TARGET
from services.store.transfer.responder import Mapper, Responder
from services.store.transfer.segments import Segments
from services.store.transfer.sockets import tune
from services.store.transfer.tls import Tls
from services.store.transfer.wake import teller
from shared.errors import ConfigError, Contended, MooncakeError, NotPermitted
from shared.messages import Ref
from shared.telemetry import log

HANDSHAKES = 128
WATCH = 1.0
"""Seconds between looks at peers that read or send too slowly."""


class Server:
    """Listens from ``start`` to ``close``. Connections that do not finish their handshake within ``timeout`` are
    closed; at most ``HANDSHAKES`` are shaking hands at once, further ones are closed at once. ``limits`` bound what is
    admitted."""

    def __init__(
        self,
        ref: Ref,
        secret: bytes,
        segments: Segments,
        guard: Guard,
        mapper: Mapper,
        on_call: CallHandler | None,
        timeout: float,
        limits: Limits,
        tls: Tls | None,
    ) -> None:
        self._ref = ref
        self._secret = secret
        self._segments = segments
        self._guard = guard
        self._mapper = mapper
        self._on_call = on_call
        self._timeout = timeout
        self._limits = limits
        self._tls = tls
        self._lock = threading.Lock()
        self._responders: dict[Responder, list[Callable[[], None]]] = {}
        self._callees: set[Callee] = set()
        self._attaching: set[asyncio.Task[None]] = set()
        self._closed = False
        self._acceptor: Acceptor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, host: str, port: int) -> int:
        """Listen; the port. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
                0
            ]
            listener = socket.create_server(address[:2], family=family, backlog=256)
        except OSError as e:
            raise ConfigError(f"cannot listen on {host} port {port}: {e}", field="host") from e
        self._acceptor = Acceptor(listener, self._shake, HANDSHAKES, "transfer-shake")
        self._watching = self._loop.create_task(self._watch())
        return int(listener.getsockname()[1])

    def connections(self) -> int:
        with self._lock:
            return len(self._responders) + len(self._callees)

    # -- accepting -----------------------------------------------------------------------------------------

    def _shake(self, sock: socket.socket) -> None:
        admitted: list[Responder] = []
        try:
            deadline = time.monotonic() + self._timeout
            tune(sock)
            if self._tls is not None:
                sock = self._tls.respond(sock, self._timeout)
            left = deadline - time.monotonic()
            greeting = respond(sock, self._secret, self._ref, left, lambda g: self._admit(sock, g, admitted))
        except Exception as e:
            if not isinstance(e, (OSError, MooncakeError)):  # a bug here must leave nothing admitted
                log("transfer").exception("a handshake failed")
            REFUSED_PEERS.inc()
            for responder in admitted:
                self._ended(responder)
            sock.close()
        else:
            self._begin(sock, greeting, admitted)

    def _admit(self, sock: socket.socket, greeting: Hello, admitted: list[Responder]) -> Sequence[int] | None:
        """The stream is known before the grants are read, so that a fence that is not in this list destroys it."""
        if greeting.role is Role.SHARE:
            raise NotPermitted("memory is shared on the Unix socket")
        with self._lock:
            self._find_room(greeting)
        if greeting.role is Role.DATA:
            responder = Responder(sock, greeting, self._segments, self._guard, self._mapper, self._ended)
            with self._lock:
                if self._closed:
                    raise NotPermitted("this agent is closing")
                self._responders[responder] = []
            TARGET.inc()
            admitted.append(responder)
        return self._guard.live_grants(greeting.me)

    def _find_room(self, greeting: Hello) -> None:
        """Under the lock. Raises Contended."""
        if len(self._responders) + len(self._callees) >= self._limits.connections:
            raise Contended(f"{self._limits.connections} connections are open here", field="data_connections")
        if greeting.role is Role.CONTROL:
            return
        if sum(responder.greeting.me == greeting.me for responder in self._responders) >= self._limits.streams:
            raise Contended(f"{greeting.me.id} has {self._limits.streams} data streams open here")

    def _begin(self, sock: socket.socket, greeting: Hello, admitted: list[Responder]) -> None:
        if admitted:
            admitted[0].serve()
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._attach_soon, sock, greeting)
        except RuntimeError:  # the loop is closed: so is the agent
            sock.close()

    def _attach_soon(self, sock: socket.socket, greeting: Hello) -> None:
        """On the loop: a handshake may end after the agent has."""
        if self._closed:
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._attach(sock, greeting))
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _attach(self, sock: socket.socket, greeting: Hello) -> None:
        callee = Callee(greeting.me, self._on_call, self._reap, self._callee_ended, self._limits.calls)
        with self._lock:
            self._callees.add(callee)
        try:
            await attach(sock, callee)
        except BaseException:
            self._callee_ended(callee)
            sock.close()
            raise
        if self._closed:
            callee.abort()

    def _callee_ended(self, callee: Callee) -> None:
        with self._lock:
            self._callees.discard(callee)

    async def _watch(self) -> None:
        """Cut off who holds memory for too long."""
        while True:
            await asyncio.sleep(min(WATCH, self._limits.frame / 4))
            now = time.monotonic()
            with self._lock:
                slow = [responder for responder in self._responders if responder.busy(now) > self._limits.frame]
            for responder in slow:
                CUT_OFF.inc()
                log("transfer").warning("a peer is too slow and was cut off", peer=responder.greeting.me.id)
                responder.destroy()

    # -- ending ----------------------------------------------------------------------------------------------

    def _ended(self, responder: Responder) -> None:
        with self._lock:
            waiting = self._responders.pop(responder, [])
        TARGET.dec()
        for tell in waiting:
            tell()

    async def destroy(self, which: Callable[[Hello], bool]) -> None:
        """End data streams and wait until their threads touch no memory any more (``join_receivers``)."""
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[None]] = []
        with self._lock:
            for responder, waiting in self._responders.items():
                if which(responder.greeting):
                    ends.append(end := loop.create_future())
                    waiting.append(teller(end))
                    responder.destroy()
        for end in ends:
            await end

    async def _reap(self, peer: Ref, streams: Iterable[int]) -> None:
        wanted = set(streams)
        await self.destroy(lambda greeting: greeting.me == peer and greeting.stream in wanted)

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            callees = list(self._callees)
        if self._acceptor is not None:
            self._acceptor.close()
            self._watching.cancel()
        for callee in callees:
            callee.abort()
        attaching = tuple(self._attaching)
        for task in attaching:
            task.cancel()
        await asyncio.gather(*attaching, return_exceptions=True)
        await self.destroy(lambda greeting: True)
