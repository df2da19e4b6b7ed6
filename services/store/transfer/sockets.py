"""Blocking sockets on threads, plain or TLS: whole reads and writes straight from and into memory, without the GIL.

A blocked call is ended from elsewhere by ``shutdown``; a peer whose machine vanished is found by keepalive.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from services.store.transfer.wire import HEADER, MIB, Header, parse_header
from shared.errors import PeerGone

IOV_MAX = 1024
BUFFER = 4 * MIB
RECORD = 16 << 10
"""Bytes of payload in a TLS record."""
GONE = 10_000
"""Milliseconds without an acknowledgement after which a connection is over: keepalive does not look then."""
Buffers = Sequence[memoryview | bytes]


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """A tuned connection. Raises PeerGone."""
    try:
        sock = socket.create_connection((host, port), timeout)
    except OSError as e:
        raise PeerGone(f"cannot connect to {host} port {port}: {e}") from e
    tune(sock)
    return sock


def connect_unix(address: str, timeout: float) -> socket.socket:
    """See :func:`unix_address`. Raises PeerGone."""
    sock = None
    try:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout)
        sock.connect(unix_address(address))
    except OSError as e:
        if sock is not None:
            sock.close()
        raise PeerGone(f"cannot connect to {address}: {e}") from e
    return sock


def unix_address(address: str) -> str:
    """``@name`` is an abstract socket, anything else a path."""
    return "\0" + address[1:] if address.startswith("@") else address


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 5),
        (socket.TCP_USER_TIMEOUT, GONE),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)


def block(sock: socket.socket, stalled: float = 0) -> None:
    """Blocking mode, in which the kernel fills a buffer in one call. ``stalled``: seconds without any progress after
    which a call raises BlockingIOError (0: never)."""
    sock.settimeout(None)
    whole, part = int(stalled), int(stalled % 1 * 1e6)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, part))


def sever(sock: socket.socket) -> None:
    """End every call that is blocked on the socket, in whatever thread; its owner closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of a TLS socket would let its thread go on without TLS


def is_over(sock: socket.socket) -> bool:
    """The other side has ended the connection, seen without blocking (whatever the socket's timeout)."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def send_all(sock: socket.socket, buffers: Buffers) -> None:
    if isinstance(sock, ssl.SSLSocket):
        return _send_sealed(sock, buffers)
    for start in range(0, len(buffers), IOV_MAX):
        _send(sock, list(buffers[start : start + IOV_MAX]))


def _send(sock: socket.socket, buffers: list[memoryview | bytes]) -> None:
    at = 0
    while at < len(buffers):
        sent = sock.sendmsg(buffers[at:] if at else buffers)
        while at < len(buffers) and sent >= len(buffers[at]):
            sent -= len(buffers[at])
            at += 1
        if sent:
            buffers[at] = memoryview(buffers[at])[sent:]


Wait = Callable[[], bool]
"""Until a socket may be used again. False: no longer."""


def send_in_time(sock: socket.socket, buffers: Buffers, wait: Wait) -> list[memoryview | bytes]:
    """As much as a plain socket takes, ``wait``ing between as long as that says; what is left."""
    rest = list(buffers)
    while rest:
        some, sent = rest[:IOV_MAX], 0
        with contextlib.suppress(BlockingIOError):
            sent = sock.sendmsg(some, (), socket.MSG_DONTWAIT)
        rest[:IOV_MAX] = left = _left(some, sent)
        if left and not wait():
            break
    return rest


def receive_in_time(sock: socket.socket, buffers: Sequence[memoryview], wait: Wait) -> list[memoryview]:
    """As much as comes on a plain socket, ``wait``ing between as long as that says; what is left to be filled. Raises
    PeerGone at the end of the stream."""
    rest = list(buffers)
    while rest:
        some, got = rest[:IOV_MAX], -1
        with contextlib.suppress(BlockingIOError):
            got = _receive_now(sock, some)
        if not got:
            raise PeerGone("the peer closed the connection")
        rest[:IOV_MAX] = left = _left(some, max(0, got))
        if left and not wait():
            break
    return rest


def _receive_now(sock: socket.socket, buffers: list[memoryview]) -> int:
    if len(buffers) == 1:
        return sock.recv_into(buffers[0], 0, socket.MSG_DONTWAIT)
    return sock.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]


def _left(buffers: Buffers, done: int) -> list[memoryview]:
    """What is left of buffers without their first ``done`` bytes."""
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [memoryview(buffer)[done:], *(memoryview(later) for later in buffers[at + 1 :])]
        done -= len(buffer)
    return []


def send_now(sock: socket.socket, data: memoryview | bytes) -> int:
    """How much of a little data could be sent without waiting; an error is left for whoever receives to find."""
    try:
        if isinstance(sock, ssl.SSLSocket):
            return sock.send(data)  # an idle connection has room for it
        return sock.send(data, socket.MSG_DONTWAIT)
    except OSError:
        return 0


def _send_sealed(sock: ssl.SSLSocket, buffers: Buffers) -> None:
    """A buffer a call, the first together with what of the second fills a record: heads travel with their payload."""
    if len(buffers) > 1 and len(buffers[0]) < RECORD:
        room = RECORD - len(buffers[0])
        buffers = [bytes(buffers[0]) + bytes(buffers[1][:room]), buffers[1][room:], *buffers[2:]]
    for buffer in buffers:
        while len(buffer):
            buffer = buffer[sock.send(buffer) :]


def receive_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fill all buffers. Raises PeerGone at the end of the stream."""
    if len(buffers) == 1 or isinstance(sock, ssl.SSLSocket):
        for buffer in buffers:
            _fill(sock, buffer)
        return
    for start in range(0, len(buffers), IOV_MAX):
        _receive(sock, list(buffers[start : start + IOV_MAX]))


def _receive(sock: socket.socket, buffers: list[memoryview]) -> None:
    at = 0
    while at < len(buffers):
        got = sock.recvmsg_into(buffers[at:] if at else buffers, 0, socket.MSG_WAITALL)[0]
        if not got:
            raise PeerGone("the peer closed the connection")
        while at < len(buffers) and got >= len(buffers[at]):
            got -= len(buffers[at])
            at += 1
        if got:
            buffers[at] = buffers[at][got:]


def _fill(sock: Readable, buffer: memoryview) -> None:
    while len(buffer):
        got = _receive_some(sock, buffer)
        if not got:
            raise PeerGone("the peer closed the connection")
        buffer = buffer[got:]


def _receive_some(sock: Readable, buffer: memoryview) -> int:
    """As much as one call gives; TLS gives a record at a time."""
    if isinstance(sock, ssl.SSLSocket):
        return sock.recv_into(buffer)
    return sock.recv_into(buffer, 0, socket.MSG_WAITALL)


class Readable(Protocol):
    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...


def receive_header(sock: Readable) -> Header:
    """Raises PeerGone, ProtocolError, OSError."""
    data = bytearray(HEADER.size)
    _fill(sock, memoryview(data))
    return parse_header(data)


def await_header(sock: socket.socket) -> Header | None:
    """As ``receive_header``. None: nothing came as long as the socket waits."""
    data = memoryview(bytearray(HEADER.size))
    try:
        got = _receive_some(sock, data)
    except (BlockingIOError, ssl.SSLWantReadError):
        return None
    if not got:
        raise PeerGone("the peer closed the connection")
    _fill(sock, data[got:])
    return parse_header(data)


def receive_body(sock: Readable, header: Header) -> bytes:
    if not header.length:
        return b""
    body = bytearray(header.length)
    _fill(sock, memoryview(body))
    return bytes(body)
