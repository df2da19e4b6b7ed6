"""Entries of a stream that go on where the one before ended: one change, read without being unpacked one by one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from shared.blocks import KEY
from shared.index.assembly import single
from shared.index.entry import ADD, CODE, DELETE, HEAD, MOST_KEYS, SEQ, VERSION, Entry, unpack

_POSITIONS = [struct.pack(f"<{n}H", *range(1, n + 1)) for n in range(MOST_KEYS + 1)]
_seq = struct.Struct("<Q").unpack_from


Received = Sequence[tuple[int, bytes]]
"""(id, packed entry), in order."""


def by_agent(entries: Received) -> list[Received]:
    """Whose they are, each agent's in order."""
    found: dict[bytes, list[tuple[int, bytes]]] = {}
    for entry in entries:
        found.setdefault(entry[1][CODE:SEQ], []).append(entry)
    return list(found.values())


class Line:
    """What one agent adds to one chain of one shard, or removes, piece after piece. ``first``: the first entry;
    ``parent``: of its first key; ``state``: the agent's after the last."""

    __slots__ = ("first", "number", "parent", "pieces", "state")

    def __init__(self, number: int, first: Entry, parent: bytes, keys: bytes) -> None:
        self.number = number
        self.first = first
        self.parent = parent
        self.pieces = [keys]
        self.state = first.state

    @staticmethod
    def of(number: int, entry: Entry) -> Line | None:
        """A line that begins with an entry which needs no other to be understood."""
        if entry.op == DELETE:
            return Line(number, entry, b"", entry.keys)
        chain = single(entry) if entry.op == ADD else None
        return None if chain is None or chain[0] is None else Line(number, entry, chain[0], chain[1])

    def take(self, entries: Received, begin: int) -> int:
        """Those entries from ``begin`` on that go on with the line become part of it; returns where they end."""
        at, seq, last, adds = begin, self.state.seq, self.pieces[-1][-KEY:], self.first.op == ADD
        shape, size, end, rest, totals = b"", -1, HEAD, b"", b""
        while at < len(entries):
            payload = entries[at][1]
            if len(payload) != size or payload[:SEQ] != shape:
                known = self._shape(payload)
                if known is None:
                    break
                shape, end, rest, totals = known
                size = len(payload)
            seq += 1
            if _seq(payload, SEQ)[0] != seq or payload[HEAD - 4 : HEAD] != totals:
                break
            if payload[end:] != (rest + last if adds else rest):
                break
            last = payload[end - KEY : end]
            self.pieces.append(payload[HEAD:end])
            at += 1
        if at > begin:
            self.state = unpack(entries[at - 1][1]).state
        return at

    def _shape(self, payload: bytes) -> tuple[bytes, int, bytes, bytes] | None:
        """(its first bytes, end of its keys, what follows them but the parent, number of keys of its batch and padding)
        of an entry that can go on with this line."""
        first, n = self.first, int.from_bytes(payload[4:6], "little")
        adds = first.op == ADD
        start = bytes((VERSION, first.op, first.tier, first.flags)) + struct.pack("<HH", n, adds) + first.code
        end = HEAD + KEY * n
        rest = _POSITIONS[n] + bytes(2) if adds and n <= MOST_KEYS else payload[end:]
        if payload[:SEQ] != start or not n or len(payload) != end + (len(rest) + KEY if adds else 2 * n):
            return None
        return start, end, rest, (struct.pack("<HH", n, 0) if adds else payload[HEAD - 4 : HEAD])
