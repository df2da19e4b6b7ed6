"""Frames on the local socket: a length (uint32 LE), then that many bytes of MessagePack. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from shared.errors import ProtocolError

HEADER = 4
MAX_FRAME = 16 << 20
"""Control messages only, never block bytes: 1 M keys fit."""

MAX_GREETING = 64 << 10
"""Before the other side has proven itself."""


def frame(body: bytes) -> bytes:
    """Raises ProtocolError for a body over the limit."""
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return len(body).to_bytes(HEADER, "little") + body


class FrameReader:
    """Bytes in, bodies out. Raises ProtocolError for a length over ``limit``, before anything is buffered for it."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEADER:
                end = at + HEADER + self._length(at)
                if end > len(self._buffer):
                    break
                body = bytes(self._buffer[at + HEADER : end])
                at = end
                yield body
        finally:
            del self._buffer[:at]

    def _length(self, at: int) -> int:
        length = int.from_bytes(self._buffer[at : at + HEADER], "little")
        if length > self.limit:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.limit}")
        return length

    @property
    def pending(self) -> int:
        return len(self._buffer)
