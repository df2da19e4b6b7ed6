"""The Unix socket on which engines attach: who they are, that they know the secret, and the pool for them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from services.store.connection import Connection
from services.store.frames import MAX_GREETING, FrameReader, frame
from services.store.local_messages import NONCE, VERSION, Challenge, Denied, Hello, Welcome, prove
from services.store.local_service import LocalService
from services.store.slab import Slab
from services.store.transfer.sockets import unix_address
from shared.blocks import Namespace
from shared.errors import MALFORMED, ConfigError, MooncakeError, ProtocolError, Unauthorized, Unavailable
from shared.messages import Ref
from shared.telemetry import log

logger = log("store.local")

GREETING_TIMEOUT = 5.0
MAX_GREETERS = 64
"""Connections that have not yet proven themselves."""

T = TypeVar("T")


class LocalSocket:
    """Listens from ``start`` to ``close``. Same user only; each engine proves that it knows ``secret``."""

    def __init__(
        self, address: str, secret: str, me: Ref, attach: Callable[[Namespace], Awaitable[Slab]], service: LocalService
    ) -> None:
        self.address = address
        self._secret = secret
        self._me = me
        self._attach = attach
        self._service = service
        self._next = 0
        self._greeters = asyncio.Semaphore(MAX_GREETERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Raises ConfigError when the address is taken."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if not self.address.startswith("@"):
                unlink_dead(self.address)
            listener.bind(unix_address(self.address))
            if not self.address.startswith("@"):
                os.chmod(self.address, 0o600)
            listener.listen(128)
        except OSError as e:
            listener.close()
            raise ConfigError(f"cannot listen on socket {self.address}: {e.strerror}", field="socket") from e
        self._listener = listener
        self._spawn(self._accept(listener))

    def _spawn(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._greeters.acquire()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as e:  # out of descriptors: others may end meanwhile
                self._greeters.release()
                logger.warning("cannot accept an engine", error=str(e))
                await asyncio.sleep(0.1)
                continue
            self._spawn(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                await self._handshake(sock)
        except MooncakeError as e:
            logger.warning("engine refused", error=e.message)
            with contextlib.suppress(OSError):
                sock.send(frame(msgspec.msgpack.encode(Denied(e.to_wire()))))
            sock.close()
        except (OSError, TimeoutError, EOFError) as e:
            logger.info("engine did not finish its greeting", error=str(e))
            sock.close()
        finally:
            self._greeters.release()

    async def _handshake(self, sock: socket.socket) -> None:
        pid = peer_pid(sock)
        nonce = secrets.token_bytes(NONCE)
        sock.send(frame(msgspec.msgpack.encode(Challenge(VERSION, nonce))))
        hello = await receive_one(sock, Hello)
        if hello.version != VERSION:
            raise ProtocolError(f"the engine speaks version {hello.version}, this agent {VERSION}", field="version")
        if not hmac.compare_digest(hello.proof, prove(self._secret, nonce)):
            raise Unauthorized("the engine does not know the secret", field="secret")
        slab = await self._attach(hello.namespace)
        await self._welcome(sock, hello.name, pid, slab)

    async def _welcome(self, sock: socket.socket, name: str, pid: int, slab: Slab) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as e:
            raise Unavailable(f"engine process {pid} cannot be watched: {e.strerror}") from e
        self._next += 1
        connection = Connection(self._next, name[:100], pid, pidfd, slab, self._service)
        welcome = Welcome(self._me, slab.name, 0, slab.memory.stride, slab.memory.slots, slab.memory.size)
        try:
            socket.send_fds(sock, [frame(msgspec.msgpack.encode(welcome))], [slab.memory.fd])
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except BaseException:
            os.close(pidfd)
            raise
        self._service.connections.add(connection)
        logger.info("engine attached", name=connection.name, pid=pid, slots=slab.memory.slots)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            if not self.address.startswith("@"):
                with contextlib.suppress(OSError):
                    os.unlink(self.address)


async def receive_one(sock: socket.socket, kind: type[T]) -> T:
    """One small frame. Raises ProtocolError, EOFError."""
    reader = FrameReader(MAX_GREETING)
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(sock, 4096)
        if not data:
            raise EOFError("closed during the greeting")
        for body in reader.feed(data):
            try:
                return msgspec.msgpack.decode(body, type=kind)
            except MALFORMED as e:
                raise ProtocolError(f"not a {kind.__name__.lower()}: {e}") from e


def peer_pid(sock: socket.socket) -> int:
    """Raises Unauthorized for another user, Unavailable for a process that cannot be seen from here."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.getuid():
        raise Unauthorized(f"user {uid} may not use the agent of user {os.getuid()}")
    if pid <= 0:
        raise Unavailable("the engine is in a process namespace that the agent cannot see; share it (hostPID)")
    return int(pid)


def unlink_dead(path: str) -> None:
    """Remove the socket of an agent that is gone; one that answers, or another file, stays (bind then fails)."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
