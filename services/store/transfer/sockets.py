"""Blocking sockets on threads: whole reads and writes straight from and into memory, without the GIL.

A blocked call is ended from elsewhere by ``shutdown``; a peer whose machine vanished is found by keepalive.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from services.store.transfer.wire import HEADER, MIB, Header, parse_header
from shared.errors import PeerGone

IOV_MAX = 1024
BUFFER = 4 * MIB
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
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout)
    try:
        sock.connect(unix_address(address))
    except OSError as e:
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
        sock.shutdown(socket.SHUT_RDWR)


def is_over(sock: socket.socket) -> bool:
    """The other side has ended the connection, seen without blocking (whatever the socket's timeout)."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def send_all(sock: socket.socket, buffers: Buffers) -> None:
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


def receive_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fill all buffers. Raises PeerGone at the end of the stream."""
    if len(buffers) == 1:
        return _fill(sock, buffers[0])
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
        got = sock.recv_into(buffer, 0, socket.MSG_WAITALL)
        if not got:
            raise PeerGone("the peer closed the connection")
        buffer = buffer[got:]


class Readable(Protocol):
    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...


def receive_header(sock: Readable) -> Header:
    """Raises PeerGone, ProtocolError, OSError."""
    data = bytearray(HEADER.size)
    _fill(sock, memoryview(data))
    return parse_header(data)


def receive_body(sock: Readable, header: Header) -> bytes:
    if not header.length:
        return b""
    body = bytearray(header.length)
    _fill(sock, memoryview(body))
    return bytes(body)
