"""The Unix socket on which engines attach: who they are, that they know the secret, and the pool for them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
from services.store.mailbox import Mailbox, mailbox_file
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

MAX_DESCRIPTORS = 4
"""Taken from one greeting; an engine brings one."""

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
            taken = " (another agent has it; name another with --socket)" if e.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"cannot listen on socket {self.address}: {e.strerror}{taken}", field="socket") from e
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
            logger.debug("engine did not finish its greeting", error=str(e))  # it asks again, or is gone
            sock.close()
        finally:
            self._greeters.release()

    async def _handshake(self, sock: socket.socket) -> None:
        pid = peer_pid(sock)
        nonce = secrets.token_bytes(NONCE)
        sock.send(frame(msgspec.msgpack.encode(Challenge(VERSION, nonce))))
        with Descriptors() as brought:
            hello = await receive_one(sock, Hello, brought)
            if hello.version != VERSION:
                raise ProtocolError(f"the engine speaks version {hello.version}, this agent {VERSION}", field="version")
            if not hmac.compare_digest(hello.proof, prove(self._secret, nonce)):
                raise Unauthorized("the engine does not know the secret", field="secret")
            slab = await self._attach(hello.namespace)
            await self._welcome(sock, hello.name, pid, watch(pid, brought), slab)

    async def _welcome(self, sock: socket.socket, name: str, pid: int, pidfd: int, slab: Slab) -> None:
        """``pidfd`` is the connection's from here on."""
        self._next += 1
        mailbox = -1
        welcome = Welcome(self._me, slab.name, 0, slab.memory.stride, slab.memory.slots, slab.memory.size)
        try:
            mailbox = mailbox_file()
            connection = Connection(self._next, name[:100], pid, pidfd, slab, Mailbox(mailbox), self._service)
            socket.send_fds(sock, [frame(msgspec.msgpack.encode(welcome))], [slab.memory.fd, mailbox])
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except BaseException:
            os.close(pidfd)
            raise
        finally:
            if mailbox >= 0:
                os.close(mailbox)
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


class Descriptors:
    """What came beside a greeting (SCM_RIGHTS): the first few are kept, and closed at the end unless taken."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def add(self, fds: list[int]) -> None:
        room = MAX_DESCRIPTORS - len(self._fds)
        self._fds += fds[:room]
        for fd in fds[room:]:
            os.close(fd)

    def take(self) -> int | None:
        """The oldest; the caller's to close."""
        return self._fds.pop(0) if self._fds else None

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_exc: object) -> None:
        while (fd := self.take()) is not None:
            os.close(fd)


async def receive_one(sock: socket.socket, kind: type[T], brought: Descriptors) -> T:
    """One small frame; what descriptors came with it are added to ``brought``. Raises ProtocolError, EOFError."""
    reader = FrameReader(MAX_GREETING)
    while True:
        await readable(sock)
        try:
            data, fds, _, _ = socket.recv_fds(sock, 4096, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        brought.add(fds)
        if not data:
            raise EOFError("closed during the greeting")
        for body in reader.feed(data):
            try:
                return msgspec.msgpack.decode(body, type=kind)
            except MALFORMED as e:
                raise ProtocolError(f"not a {kind.__name__.lower()}: {e}") from e


async def readable(sock: socket.socket) -> None:
    """Returns once ``sock`` has something to read, or its other end is closed."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def peer_pid(sock: socket.socket) -> int:
    """0 for a process in a namespace that cannot be seen from here. Raises Unauthorized for another user."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.getuid():
        raise Unauthorized(f"user {uid} may not use the agent of user {os.getuid()}")
    return max(0, int(pid))


def watch(pid: int, brought: Descriptors) -> int:
    """A pidfd of the engine: readable once it has ended. An engine in another container (``pid`` 0) must have brought
    one. Raises Unavailable."""
    if pid:
        try:
            return os.pidfd_open(pid)
        except OSError as e:
            raise Unavailable(f"engine process {pid} cannot be watched: {e.strerror}") from e
    fd = brought.take()
    if fd is None:
        raise Unavailable("the engine is in a process namespace that the agent cannot see, and brought no pidfd")
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(("anon_inode:[pidfd", "pidfd:[")):
        os.close(fd)
        raise Unavailable("the engine brought a descriptor that is no pidfd")
    return fd


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
