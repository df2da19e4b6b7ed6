"""Frames in flight: what is said of slices to the target, and what is to be received of its answer. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.store.transfer.batches import Job, Slice
from services.store.transfer.link import Refusals
from services.store.transfer.spans import Span, views
from services.store.transfer.wire import HEADER, Kind, Range, SegmentRef, pack, pack_ranges, parse_errors, parse_header
from shared.errors import MooncakeError, ProtocolError


@dataclass
class Frame:
    """Slices of one kind. ``buffers``: all that is sent, head and payload."""

    tag: int
    kind: Kind
    slices: list[Slice]

    def buffers(self) -> list[memoryview | bytes]:
        head = pack(self.kind, self.tag, _ranges(self.slices))
        return [head, *self.into()] if self.kind is Kind.WRITE else [head]

    @property
    def bytes(self) -> int:
        """Without the head."""
        return sum(piece.length for piece in self.slices)

    def into(self) -> list[memoryview]:
        """The local memory of all slices."""
        return views(_local(self.slices))


class Answer:
    """To ``frame``: fill all of ``wanted``, then call ``filled``, which says what is wanted next; nothing, at last.
    ``refused`` is right then. Raises ProtocolError."""

    def __init__(self, frame: Frame) -> None:
        self.refused: Refusals = {}
        self._frame = frame
        self._bytes = bytearray(HEADER.size)
        self._then: Callable[[], None] = self._header
        self.wanted = [memoryview(self._bytes)]

    def after_head(self, some: memoryview) -> Answer:
        """So much of the header is here, not one byte more."""
        self._bytes[: len(some)] = some
        self.wanted = [memoryview(self._bytes)[len(some) :]]
        return self

    def after_all_but(self, left: list[memoryview]) -> Answer:
        """Nothing was refused, and all but the last of the payload is here."""
        self.wanted, self._then = left, self._end
        return self

    def filled(self) -> None:
        self._then()

    def _header(self) -> None:
        header, frame = parse_header(self._bytes), self._frame
        if header.kind is not Kind.DONE or header.tag != frame.tag:
            raise ProtocolError(f"{header.kind.name} {header.tag} where the answer to {frame.tag} belongs")
        if not header.length:
            return self._payload()
        self._bytes = bytearray(header.length)
        self.wanted, self._then = [memoryview(self._bytes)], self._body

    def _body(self) -> None:
        self.refused = _refusals(self._frame.slices, parse_errors(bytes(self._bytes)))
        self._payload()

    def _payload(self) -> None:
        frame = self._frame
        self.wanted = views(_allowed(frame.slices, self.refused)) if frame.kind is Kind.READ else []
        self._then = self._end

    def _end(self) -> None:
        self.wanted = []


def _ranges(slices: list[Slice]) -> bytes:
    """The body that describes slices to the target."""
    table: dict[SegmentRef, int] = {}
    ranges = []
    for piece in slices:
        request = piece.job.request
        segment = table.setdefault(piece.target, len(table))
        source, at = 0, 0
        if piece.source is not None:
            source, at = table.setdefault(piece.source, len(table)), request.local_offset + piece.offset
        step = piece.job.step if piece.job.step < piece.length else 0
        ranges.append(Range(segment, request.offset + piece.offset, piece.length, request.grant, source, at, step))
    return pack_ranges(list(table), ranges)


def _local(slices: list[Slice]) -> list[Span]:
    return [_span(piece.job, piece.offset, piece.length) for piece in slices]


def _allowed(slices: list[Slice], refused: Refusals) -> list[Span]:
    """Where the bytes go that the target sends: all but those of refused pieces."""
    if not refused:
        return _local(slices)
    return [
        _span(piece.job, at, length)
        for index, piece in enumerate(slices)
        for number, (at, length) in enumerate(piece.pieces())
        if number not in refused.get(index, ())
    ]


def _span(job: Job, offset: int, length: int) -> Span:
    assert job.local is not None
    return job.local, job.request.local_offset + offset, length


def _refusals(slices: list[Slice], errors: dict[int, MooncakeError]) -> Refusals:
    """Errors counted over the frame, as errors of each slice. Raises ProtocolError."""
    refused: Refusals = {}
    first = 0
    for index, piece in enumerate(slices):
        count = len(piece.pieces())
        mine = {number - first: error for number, error in errors.items() if first <= number < first + count}
        if mine:
            refused[index] = mine
        first += count
    if any(not 0 <= number < first for number in errors):
        raise ProtocolError("the target refused what was not asked")
    return refused
