"""The data port's frames: a 16-byte header, a bounded body, and for data a payload that never passes through here.

Pure: bytes in, values out. Everything that is no frame raises ProtocolError before any of it is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from shared.errors import MALFORMED, InvalidInput, MooncakeError, ProtocolError, WireError

T = TypeVar("T")
VERSION = 1
MAGIC = b"MMX\x01"
TLS = (b"\x15\x03", b"\x16\x03")
"""How an alert and a handshake of TLS begin."""
HEADER = struct.Struct("<4sBBHII")
RANGE = struct.Struct("<HHIQQQQ")
MAX_RANGES = 1024
MAX_PIECES = 1 << 16
MAX_LENGTH = 1 << 40
MAX_GRANT = (1 << 64) - 1
MAX_NAME = 255
KIB = 1 << 10
MIB = 1 << 20


class Kind(IntEnum):
    """What a frame is. Each has its own limit of body bytes: see LIMITS."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    READ = 16  # ranges -> DONE + the bytes of those that were allowed
    WRITE = 17  # ranges + payload -> DONE
    PULL = 18  # ranges of a mapped segment of the sender, which the target copies in itself -> DONE
    VERIFY = 19  # ranges that were read one-sided: still good? -> DONE
    DONE = 20
    COPY = 21  # never sent: a slice that the initiator copies itself out of a mapping
    CALL = 32
    ANSWER = 33
    FAULT = 34
    REAP = 35  # stream ids that the sender gave up -> REAPED once nothing of them can land any more
    REAPED = 36
    SEGMENT = 48  # a segment's name -> its shape, with descriptors beside it
    SHAPE = 49


_KINDS = {int(kind): kind for kind in Kind}  # a look-up here takes a tenth of what the enum's takes
LIMITS = {
    Kind.HELLO: 4 * KIB,
    Kind.CHALLENGE: 4 * KIB,
    Kind.PROOF: 4 * KIB,
    Kind.WELCOME: 4 * MIB,
    Kind.REFUSED: 64 * KIB,
    Kind.READ: MIB,
    Kind.WRITE: MIB,
    Kind.PULL: MIB,
    Kind.VERIFY: MIB,
    Kind.DONE: MIB,
    Kind.COPY: 0,
    Kind.CALL: 64 * MIB,
    Kind.ANSWER: 64 * MIB,
    Kind.FAULT: MIB,
    Kind.REAP: MIB,
    Kind.REAPED: 0,
    Kind.SEGMENT: 4 * KIB,
    Kind.SHAPE: 64 * KIB,
}


class Header(NamedTuple):
    kind: Kind
    tag: int
    length: int


class SegmentRef(NamedTuple):
    """A segment as one registration knew it. ``instance`` 0: whichever is registered under that name now."""

    name: str
    instance: int = 0


class Range(NamedTuple):
    """One range of a data frame; ``segment`` and ``source`` index the frame's table of segments. ``source`` and
    ``source_offset`` are used by PULL alone. ``step``: the range is a run of requests of that many bytes, each of
    them checked and answered for alone (0: it is one)."""

    segment: int
    offset: int
    length: int
    grant: int
    source: int = 0
    source_offset: int = 0
    step: int = 0

    @property
    def pieces(self) -> int:
        return self.length // self.step if self.step else 1


def pack(kind: Kind, tag: int, body: bytes = b"") -> bytes:
    """A whole frame."""
    if len(body) > LIMITS[kind]:
        raise ProtocolError(f"{kind.name} of {len(body)} bytes is over its limit of {LIMITS[kind]}")
    return HEADER.pack(MAGIC, kind, 0, 0, tag, len(body)) + body


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Raises ProtocolError for anything else than a header of this version within its limit."""
    magic, code, flags, reserved, tag, length = HEADER.unpack(data)
    if magic != MAGIC:
        if magic[:2] in TLS:
            raise ProtocolError("the peer speaks TLS: data_tls_* are set there and not here", field="magic")
        raise ProtocolError("not a frame of this protocol version", field="magic")
    kind = _KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"unknown frame kind {code}", field="kind")
    if flags or reserved:
        raise ProtocolError("reserved bits are set", field="flags")
    if length > LIMITS[kind]:
        raise ProtocolError(f"{kind.name} of {length} bytes is over its limit of {LIMITS[kind]}", field="length")
    return Header(kind, tag, length)


class Parser:
    """Cuts a byte stream, however split, into frames without payload (the control stream)."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._header: Header | None = None

    def feed(self, data: bytes) -> list[tuple[Header, bytes]]:
        """Frames completed by ``data``. Raises ProtocolError; the stream is then lost."""
        self._data += data
        frames, at = [], 0
        with memoryview(self._data) as view:
            while True:
                if self._header is None:
                    if len(view) - at < HEADER.size:
                        break
                    self._header = parse_header(view[at : at + HEADER.size])
                    at += HEADER.size
                header, end = self._header, at + self._header.length
                if end > len(view):
                    break
                frames.append((header, bytes(view[at:end])))
                self._header, at = None, end
        del self._data[:at]
        return frames


def check_name(name: str) -> None:
    """A segment's. Raises InvalidInput for what no frame could carry: half of a surrogate pair is no text."""
    try:
        fits = 0 < len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidInput(f"a segment's name is text of 1..{MAX_NAME} bytes, not {name[:MAX_NAME]!r}", field="segment")


def pack_ranges(segments: Sequence[SegmentRef], ranges: Sequence[Range]) -> bytes:
    """Body of READ, WRITE, PULL, VERIFY."""
    parts = [struct.pack("<H", len(segments))]
    for segment in segments:
        name = segment.name.encode()
        parts.append(struct.pack("<QB", segment.instance, len(name)) + name)
    make = RANGE.pack
    parts += [make(r.segment, r.source, r.step, r.offset, r.length, r.grant, r.source_offset) for r in ranges]
    return b"".join(parts)


def parse_ranges(body: bytes | memoryview) -> tuple[list[SegmentRef], list[Range]]:
    """Segments and ranges of a data frame; lengths are checked here, bounds by whoever has the segments."""
    try:
        segments, at = _parse_segments(bytes(body))
        ranges = [Range(s, o, n, g, src, so, step) for s, src, step, o, n, g, so in RANGE.iter_unpack(body[at:])]
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise ProtocolError(f"malformed ranges: {e}") from None
    if not 0 < len(ranges) <= MAX_RANGES:
        raise ProtocolError(f"{len(ranges)} ranges in a frame, 1..{MAX_RANGES} are allowed")
    known, pieces = len(segments), 0
    for segment, _, length, _, source, _, step in ranges:
        if length > MAX_LENGTH or segment >= known or source >= known:
            raise ProtocolError("a range names no segment of its frame, or is too long")
        if not step:
            pieces += 1
        elif length and not length % step:
            pieces += length // step
        else:
            raise ProtocolError("a range is not a whole number of steps")
    if pieces > MAX_PIECES:
        raise ProtocolError(f"more than {MAX_PIECES} requests in a frame")
    return segments, ranges


def _parse_segments(body: bytes) -> tuple[list[SegmentRef], int]:
    segments, at = [], 2
    for _ in range(struct.unpack_from("<H", body)[0]):
        instance, size = struct.unpack_from("<QB", body, at)
        at += 9
        if at + size > len(body):
            raise IndexError("name leaves the body")
        segments.append(SegmentRef(body[at : at + size].decode(), instance))
        at += size
    return segments, at


_errors = msgspec.msgpack.Decoder(dict[int, WireError])
_fault = msgspec.msgpack.Decoder(WireError)
_ids = msgspec.msgpack.Decoder(list[int])
_encode = msgspec.msgpack.Encoder().encode


def pack_errors(errors: dict[int, MooncakeError]) -> bytes:
    """Body of DONE: which pieces were refused, counted over all ranges of the frame; empty when none was."""
    return _encode({i: e.to_wire() for i, e in errors.items()}) if errors else b""


def parse_errors(body: bytes) -> dict[int, MooncakeError]:
    if not body:
        return {}
    return {i: MooncakeError.from_wire(e) for i, e in _decoded(_errors, body).items()}


def pack_fault(error: MooncakeError) -> bytes:
    return _encode(error.to_wire())


def parse_fault(body: bytes) -> MooncakeError:
    return MooncakeError.from_wire(_decoded(_fault, body))


def pack_ids(ids: Sequence[int]) -> bytes:
    return _encode(list(ids))


def parse_ids(body: bytes) -> list[int]:
    return _decoded(_ids, body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except MALFORMED as e:
        raise ProtocolError(f"malformed body: {e}") from None
