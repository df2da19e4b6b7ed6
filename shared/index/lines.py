"""Entries of a stream that go on where the one before ended: one change, read without being unpacked one by one."""

from __future__ import annotations

import struct

from shared.blocks import KEY
from shared.index.assembly import single
from shared.index.digest import State
from shared.index.entry import ADD, DELETE, HEAD, HEAD_FORMAT, MOST_KEYS, VERSION, Entry

_AT_ONCE = [struct.pack(f"<{n}H", *range(1, n + 1)) + bytes(2) for n in range(MOST_KEYS + 1)]
"""Positions of a whole batch of n keys, and the index of its one head."""


class Line:
    """What one agent adds to one chain of one shard, or removes, piece after piece. ``first``: the first entry;
    ``parent``: of its first key; ``state``: the agent's after the last."""

    __slots__ = ("_adds", "_last", "_start", "first", "number", "parent", "pieces", "state")

    def __init__(self, number: int, first: Entry, parent: bytes, keys: bytes) -> None:
        self.number = number
        self.first = first
        self.parent = parent
        self.pieces = [keys]
        self.state = first.state
        self._adds = first.op == ADD
        self._last = keys[-KEY:]
        self._start = bytes((VERSION, first.op, first.tier, first.flags))

    @staticmethod
    def of(number: int, entry: Entry) -> Line | None:
        """A line that begins with an entry which needs no other to be understood."""
        if entry.op == DELETE:
            return Line(number, entry, b"", entry.keys)
        chain = single(entry) if entry.op == ADD else None
        return None if chain is None or chain[0] is None else Line(number, entry, chain[0], chain[1])

    def takes(self, payload: bytes) -> bool:
        """Whether this packed entry goes on with the line; then it is part of it."""
        if payload[:4] != self._start or len(payload) < HEAD:
            return False
        _, _, _, _, n, heads, code, seq, size, xor, _, total, _ = HEAD_FORMAT.unpack_from(payload)
        end = HEAD + KEY * n
        if code != self.first.code or seq != self.state.seq + 1 or len(payload) != end + 2 * n + (2 + KEY) * heads:
            return False
        if self._adds:
            if heads != 1 or total != n or n > MOST_KEYS or payload[-KEY:] != self._last:
                return False
            if payload[end:-KEY] != _AT_ONCE[n]:
                return False
            self._last = payload[end - KEY : end]
        self.pieces.append(payload[HEAD:end])
        self.state = State(seq, size, int.from_bytes(xor, "big"))
        return True
