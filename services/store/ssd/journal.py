"""The log of the SSD tier: fixed-size entries that each prove themselves, and what a damaged log still says. Pure.

A log is a header with a random number, then entries. An entry's checksum covers that number too, so nothing of another
log is ever taken for this one's. Entries are appended in the order of their numbers; what is cut off, torn, flipped
or out of order is skipped and counted. The bytes of a block are not in the log but their xxh3 is: an entry that
outlived its block's bytes is found out when they are read.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import xxhash

from shared.blocks import KEY

MAGIC = b"MCSSD\x00\x02\n"
_HEADER = struct.Struct("<8sQ")
_CHECK = struct.Struct("<Q")
_ENTRY = struct.Struct(f"<QQQIIIBB2x{KEY}s{KEY}s{KEY}s")

HEADER = _HEADER.size + _CHECK.size
ENTRY = _ENTRY.size + _CHECK.size

Where = tuple[int, int]
"""(segment, slot)"""


class Op(IntEnum):
    SEGMENT = 1  # ``slot`` slots of ``length`` bytes each belong to ``namespace`` from now on
    GONE = 2  # the segment is nobody's any more
    PUT = 3  # ``length`` bytes with ``checksum`` lie at (segment, slot)
    DROP = 4  # they do not any more


_OPS = frozenset(Op)


@dataclass(frozen=True, slots=True)
class Entry:
    """One change. ``checksum`` is the xxh3 of the block's valid bytes, ``tenant`` the tag of whose it is. ``seq`` grows
    along the log; it is given to an entry when that is encoded."""

    op: Op
    segment: int
    slot: int = 0
    length: int = 0
    checksum: int = 0
    namespace: bytes = bytes(KEY)
    key: bytes = bytes(KEY)
    parent: bytes = b""
    seq: int = 0
    tenant: int = 0

    @property
    def where(self) -> Where:
        return self.segment, self.slot


@dataclass(frozen=True, slots=True)
class Live:
    """What is left when a log has been read: entries that still hold, by number; ``bad``: entries that did not check
    or contradict the others."""

    entries: list[Entry]
    bad: int = 0
    segment: int = -1  # the greatest segment id seen


def new_header() -> bytes:
    start = _HEADER.pack(MAGIC, secrets.randbits(64))
    return start + _CHECK.pack(xxhash.xxh3_64_intdigest(start))


def _number(header: bytes) -> int | None:
    """The log's random number; None for what is no header of ours."""
    if len(header) < HEADER:
        return None
    magic, number = _HEADER.unpack_from(header)
    (check,) = _CHECK.unpack_from(header, _HEADER.size)
    good = magic == MAGIC and check == xxhash.xxh3_64_intdigest(header[: _HEADER.size])
    return number if good else None


class Codec:
    """Entries of the log that begins with ``header``. Raises ValueError for a header that is none."""

    def __init__(self, header: bytes) -> None:
        number = _number(header)
        if number is None:
            raise ValueError("not the header of a log")
        self._seed: int = number

    def encode(self, e: Entry, seq: int) -> bytes:
        body = _ENTRY.pack(
            seq, e.checksum, e.tenant, e.segment, e.slot, e.length, e.op, bool(e.parent), e.namespace, e.key, e.parent
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body, self._seed))

    def encode_all(self, entries: Iterable[Entry], seq: int) -> bytes:
        """Numbered from ``seq`` on."""
        return b"".join(self.encode(e, seq + i) for i, e in enumerate(entries))

    def decode(self, data: bytes) -> Entry | None:
        """None for what does not check."""
        if len(data) != ENTRY:
            return None
        (check,) = _CHECK.unpack_from(data, _ENTRY.size)
        if check != xxhash.xxh3_64_intdigest(data[: _ENTRY.size], self._seed):
            return None
        seq, checksum, tenant, segment, slot, length, op, has_parent, namespace, key, parent = _ENTRY.unpack_from(data)
        if op not in _OPS:
            return None
        parent = parent if has_parent else b""
        return Entry(Op(op), segment, slot, length, checksum, namespace, key, parent, seq, tenant)


@dataclass
class _Replay:
    """The state that entries add up to."""

    segments: dict[int, Entry] = field(default_factory=dict)
    at: dict[Where, Entry] = field(default_factory=dict)
    places: dict[tuple[bytes, bytes], Where] = field(default_factory=dict)

    def apply(self, e: Entry) -> bool:
        """False for what cannot be."""
        if e.op is Op.SEGMENT:
            return self._segment(e)
        of = self.segments.get(e.segment)
        if of is None or of.namespace != e.namespace:
            return False
        if e.op is Op.GONE:
            self._clear(e.segment)
            return True
        return self._put(e, of) if e.op is Op.PUT else self._drop(e)

    def _segment(self, e: Entry) -> bool:
        if not (e.slot and e.length) or e.segment in self.segments:
            return False
        self.segments[e.segment] = e
        return True

    def _clear(self, segment: int) -> None:
        for slot in range(self.segments.pop(segment).slot):
            self._empty((segment, slot))

    def _empty(self, where: Where) -> None:
        old = self.at.pop(where, None)
        if old is not None:
            del self.places[old.namespace, old.key]

    def _put(self, e: Entry, of: Entry) -> bool:
        if e.slot >= of.slot or not 0 < e.length <= of.length:
            return False
        self._empty(e.where)
        before = self.places.get((e.namespace, e.key))
        if before is not None:
            self._empty(before)
        self.at[e.where] = e
        self.places[e.namespace, e.key] = e.where
        return True

    def _drop(self, e: Entry) -> bool:
        there = self.at.get(e.where)
        if there is not None and there.key == e.key:
            self._empty(e.where)
        return True  # what it drops may have been lost before


def recover(data: bytes) -> Live:
    """What the log says, whatever has happened to it. Never raises. A log without its header says nothing."""
    if not data:
        return Live([])
    if _number(data) is None:
        return Live([], bad=1)
    codec, replay, bad, last, segment = Codec(data), _Replay(), 0, 0, -1
    for at in range(HEADER, len(data), ENTRY):
        entry = codec.decode(data[at : at + ENTRY])
        if entry is None or entry.seq <= last or not replay.apply(entry):
            bad += 1
            continue
        last, segment = entry.seq, max(segment, entry.segment)
    live = sorted([*replay.segments.values(), *replay.at.values()], key=lambda e: e.seq)
    return Live(live, bad, segment)


def rewrite(live: Live) -> bytes:
    """A new log that says the same and no more, numbered anew."""
    header = new_header()
    return header + Codec(header).encode_all(live.entries, 1)
