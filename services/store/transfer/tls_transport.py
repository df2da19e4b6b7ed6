"""An asyncio transport over a TLS socket that has shaken hands already, blocking, on another thread.

The loop's own TLS can only begin with the handshake; here the role of a connection is known after it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

READ = 256 << 10
READS = 8
PIECE = 64 << 10
HIGH = 1 << 20
Blocked = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsTransport(asyncio.Transport):
    """Owns ``sock``. Lives on the loop. ``pause_writing`` comes above 1 MiB waiting, ``resume_writing`` at nothing."""

    def __init__(self, sock: ssl.SSLSocket, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": sock})
        self._sock = sock
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._full = False
        self._paused = False
        self._closed = False
        self._writer = False
        sock.setblocking(False)
        protocol.connection_made(self)
        self._loop.add_reader(sock.fileno(), self._readable)
        self._loop.call_soon(self._readable)  # what came with the handshake's last record is in no socket any more

    # -- reading -----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        """Read what is there, in turns: a peer that never pauses does not starve the loop."""
        for _ in range(READS):
            if self._closed or self._paused:
                return
            try:
                data = self._sock.recv(READ)
            except Blocked:
                return
            except OSError as e:
                return self._lose(e)
            if not data:
                return self._lose(None)
            self._protocol.data_received(data)
        self._loop.call_soon(self._readable)  # bytes that TLS holds already wake no poll

    def pause_reading(self) -> None:
        if not self._paused and not self._closed:
            self._paused = True
            self._loop.remove_reader(self._sock.fileno())

    def resume_reading(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._loop.call_soon(self._readable)

    def is_reading(self) -> bool:
        return not (self._paused or self._closed)

    # -- writing -----------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed or not data:
            return
        whole = memoryview(bytes(data))
        self._waiting.extend(whole[at : at + PIECE] for at in range(0, len(whole), PIECE))
        self._size += len(whole)
        if not self._writer:
            self._flush()
        if self._size > HIGH and not self._full and not self._closed:
            self._full = True
            self._protocol.pause_writing()

    def _flush(self) -> None:
        while self._waiting:
            try:
                sent = self._sock.send(self._waiting[0])  # all of it, or to be tried again as it is
            except Blocked:
                return self._await_room()
            except OSError as e:
                return self._lose(e)
            self._size -= sent
            self._waiting[0] = self._waiting[0][sent:]
            if not self._waiting[0]:
                self._waiting.popleft()
        self._forget_room()
        if self._full:
            self._full = False
            self._protocol.resume_writing()

    def _await_room(self) -> None:
        if not self._writer:
            self._writer = True
            self._loop.add_writer(self._sock.fileno(), self._flush)

    def _forget_room(self) -> None:
        if self._writer:
            self._writer = False
            self._loop.remove_writer(self._sock.fileno())

    def get_write_buffer_size(self) -> int:
        return self._size

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, HIGH

    # -- ending ------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        """As ``abort``: what the other side has not got by now it does not need."""
        self.abort()

    def abort(self) -> None:
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._forget_room()
        self._waiting.clear()
        self._size = 0
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
