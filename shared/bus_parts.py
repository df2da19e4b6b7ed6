"""Payloads above the bus's limit travel in parts: cutting and putting together again, pure.

A part is ``MAGIC | message id | index | parts | bytes of the whole`` and its slice of the payload. Parts of several
messages may interleave, come twice or out of order, be lost or be garbage; memory and time for incomplete ones
are bounded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

MAGIC = b"\xffMCP"  # no message begins so: its first byte is the protocol version
_HEAD = struct.Struct("<4s16sHHI")
HEAD = _HEAD.size
MAX_MESSAGE = 64 << 20
MAX_PARTS = 0xFFFF


def is_part(payload: bytes) -> bool:
    return payload[: len(MAGIC)] == MAGIC


def split(payload: bytes, limit: int, id: bytes) -> Iterator[bytes]:
    """Parts of at most ``limit`` bytes each. ``id``: 16 bytes, unique among messages in flight.

    Raises ValueError when ``payload`` is larger than MAX_MESSAGE or needs more than MAX_PARTS parts.
    """
    room = limit - HEAD
    parts = -(-len(payload) // room) if room > 0 else 0
    if len(payload) > MAX_MESSAGE or not 0 < parts <= MAX_PARTS:
        raise ValueError(f"{len(payload)} bytes do not fit into parts of {limit} bytes")
    for index in range(parts):
        yield _HEAD.pack(MAGIC, id, index, parts, len(payload)) + payload[index * room : (index + 1) * room]


@dataclass
class _Partial:
    parts: int
    size: int
    since: float
    slices: dict[int, bytes] = field(default_factory=dict)
    held: int = 0


class Reassembly:
    """Incomplete messages of one receiver. At most ``limit`` bytes are held (oldest go first), each at most
    ``patience`` seconds. ``dropped`` counts parts that were garbage and messages given up."""

    def __init__(self, limit: int = 4 * MAX_MESSAGE, patience: float = 10.0) -> None:
        self._limit = limit
        self._patience = patience
        self._partials: dict[bytes, _Partial] = {}
        self.held = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._partials)

    def add(self, part: bytes, now: float) -> bytes | None:
        """The whole payload when ``part`` was its last missing one, else None. ``now``: seconds, a monotonic clock."""
        self.expire(now)
        parsed = _parse(part)
        if parsed is None:
            self.dropped += 1
            return None
        id, index, parts, size, data = parsed
        partial = self._partials.get(id)
        if partial is None:
            partial = self._partials[id] = _Partial(parts, size, now)
        if (partial.parts, partial.size) == (parts, size) and index in partial.slices:
            return None
        if (partial.parts, partial.size) != (parts, size) or partial.held + len(data) > size:
            self._drop(id)
            return None
        partial.slices[index] = data
        partial.held += len(data)
        self.held += len(data)
        return self._whole(id, partial)

    def expire(self, now: float) -> None:
        """Give up what has waited longer than the patience. Partials are kept in order of arrival."""
        while self._partials:
            id, oldest = next(iter(self._partials.items()))
            if now - oldest.since <= self._patience:
                return
            self._drop(id)

    def _whole(self, id: bytes, partial: _Partial) -> bytes | None:
        if len(partial.slices) < partial.parts:
            while self.held > self._limit:
                self._drop(next(iter(self._partials)))
            return None
        del self._partials[id]
        self.held -= partial.held
        if partial.held != partial.size:
            self.dropped += 1
            return None
        return b"".join(partial.slices[index] for index in range(partial.parts))

    def _drop(self, id: bytes) -> None:
        self.held -= self._partials.pop(id).held
        self.dropped += 1


def _parse(part: bytes) -> tuple[bytes, int, int, int, bytes] | None:
    if len(part) <= HEAD or not is_part(part):
        return None
    _, id, index, parts, size = _HEAD.unpack_from(part)
    if index >= parts or size > MAX_MESSAGE or size < parts:
        return None
    return id, index, parts, size, part[HEAD:]
