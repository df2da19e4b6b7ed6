"""The target's end of one data stream: a thread that answers READ, WRITE, PULL and VERIFY frames.

A READ is pinned, then checked (both by the guard, ``pin_first``), then copied out. A WRITE is checked before a byte
of it is received (``token``); what is refused is drained into nowhere. The guard's contexts last while bytes move,
and the thread's end is what ``destroy_endpoints`` waits for (``join_receivers``).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from services.store.transfer.base import Guard, OpenGuard
from services.store.transfer.copying import copy
from services.store.transfer.handshake import Hello
from services.store.transfer.segments import Memory, Segment, Segments
from services.store.transfer.sockets import await_header, block, receive_all, receive_body, send_all, sever
from services.store.transfer.spans import Span, views
from services.store.transfer.wire import KIB, Header, Kind, Range, SegmentRef, pack, pack_errors, parse_ranges
from shared.errors import InternalError, MooncakeError, PeerGone, ProtocolError
from shared.messages import Ref
from shared.telemetry import log

STALLED = 10.0
NOWHERE = 256 * KIB


Mapper = Callable[[Hello, SegmentRef], Memory]
Ask = Callable[[Ref, str, int, int, int], AbstractContextManager[None]]


class Part(NamedTuple):
    """Pieces [number, number + pieces) of a frame, which follow each other in memory: ``span`` is where."""

    span: Span | None
    number: int
    pieces: int
    length: int
    source: int
    source_offset: int


class Frame:
    """A frame's ranges with what they hold until ``close``, while it is served: segments in use, guards entered."""

    def __init__(self, segments: Segments, guard: Guard, greeting: Hello, body: bytes) -> None:
        self.table, self.ranges = parse_ranges(body)
        self.errors: dict[int, MooncakeError] = {}
        self._segments = segments
        self._guard = guard
        self._open = type(guard) is OpenGuard and guard.remote_write
        self._peer = greeting.me
        self._used: dict[int, Segment | MooncakeError] = {}
        self._entered: ExitStack | None = None

    def close(self) -> None:
        """Idempotent."""
        used, self._used = self._used, {}
        try:
            if self._entered is not None:
                self._entered.close()
        finally:
            for segment in used.values():
                if isinstance(segment, Segment):
                    self._segments.let_go(segment)

    def admit(self, reading: bool) -> list[Part]:
        """All pieces in order; those without a span may not be moved, ``errors`` says why."""
        parts: list[Part] = []
        first = 0
        for item in self.ranges:
            if self._open and (span := self._whole(item)) is not None:
                parts.append(Part(span, first, item.pieces, item.length, item.source, item.source_offset))
            else:
                self._admit_each(item, first, reading, parts)
            first += item.pieces
        return parts

    def _whole(self, item: Range) -> Span | None:
        """A guard that allows everything need not be asked about each piece of a run."""
        try:
            segment = self._segment(item.segment)
            segment.check(item.offset, item.length)
        except MooncakeError:
            return None
        return segment, item.offset, item.length

    def _admit_each(self, item: Range, first: int, reading: bool, parts: list[Part]) -> None:
        ask = self._guard.reading if reading else self._guard.writing
        step = item.step or item.length
        for index in range(item.pieces):
            at = index * step
            span = self._admit(first + index, item, item.offset + at, step, ask)
            parts.append(Part(span, first + index, 1, step, item.source, item.source_offset + at))

    def _admit(self, number: int, item: Range, offset: int, length: int, ask: Ask) -> Span | None:
        try:
            segment = self._segment(item.segment)
            segment.check(offset, length)
            asked = ask(self._peer, segment.name, offset, length, item.grant)
            if self._entered is None:
                self._entered = ExitStack()
            self._entered.enter_context(asked)
        except MooncakeError as e:
            self.errors[number] = e
            return None
        except Exception as e:  # a guard with a bug refuses, it does not take the stream down
            self.errors[number] = InternalError(f"guard failed: {e!r}")
            return None
        return segment, offset, length

    def _segment(self, index: int) -> Segment:
        used = self._used.get(index)
        if used is None:
            used = self._used[index] = self._use(self.table[index])
        if isinstance(used, MooncakeError):
            raise used
        return used

    def _use(self, ref: SegmentRef) -> Segment | MooncakeError:
        try:
            return self._segments.use(ref.name, ref.instance)
        except MooncakeError as e:
            return e


class Responder:
    """Owns its socket. ``on_end`` is called on the thread, last of all, when no memory is touched any more."""

    def __init__(
        self,
        sock: socket.socket,
        greeting: Hello,
        segments: Segments,
        guard: Guard,
        mapper: Mapper,
        on_end: Callable[[Responder], None],
    ) -> None:
        self.greeting = greeting
        self._sock = sock
        self._segments = segments
        self._guard = guard
        self._mapper = mapper
        self._on_end = on_end
        self._ending = False
        self._since = 0.0
        self._nowhere = memoryview(bytearray(NOWHERE))
        self._served = {
            Kind.READ: self._read,
            Kind.WRITE: self._write,
            Kind.PULL: self._pull,
            Kind.VERIFY: self._verify,
        }
        self.thread = threading.Thread(target=self._run, name="transfer-serve", daemon=True)

    def serve(self) -> None:
        """Start the thread. Where there is none to be had, the stream ends at once."""
        try:
            self.thread.start()
        except RuntimeError:
            self._sock.close()
            self._on_end(self)

    def destroy(self) -> None:
        self._ending = True
        sever(self._sock)

    def busy(self, now: float) -> float:
        """Seconds that the frame being served has taken so far, by the monotonic clock."""
        return now - since if (since := self._since) else 0.0

    def _run(self) -> None:
        try:
            block(self._sock, STALLED)
            while not self._ending:
                header = self._next()
                self._since = time.monotonic()
                self._serve(header)
                self._since = 0.0
        except (OSError, MooncakeError):
            pass  # the initiator sees the end of the stream and reports it
        except Exception:
            log("transfer").exception("serving a stream failed", peer=self.greeting.me.id)
        finally:
            self._sock.close()
            self._on_end(self)

    def _next(self) -> Header:
        while not self._ending:
            if (header := await_header(self._sock)) is not None:
                return header  # idle for as long as it likes; a frame once begun may not stall
        raise PeerGone("the stream was destroyed")

    def _serve(self, header: Header) -> None:
        body = receive_body(self._sock, header)
        serve = self._served.get(header.kind)
        if serve is None:
            raise ProtocolError(f"{header.kind.name} on a data stream")
        frame = Frame(self._segments, self._guard, self.greeting, body)
        try:
            serve(header, frame)
        finally:
            frame.close()

    def _read(self, header: Header, frame: Frame) -> None:
        parts = frame.admit(reading=True)
        send_all(self._sock, [_done(header, frame), *_views(parts)])

    def _verify(self, header: Header, frame: Frame) -> None:
        frame.admit(reading=True)
        send_all(self._sock, [_done(header, frame)])

    def _write(self, header: Header, frame: Frame) -> None:
        parts = frame.admit(reading=False)
        if self._ending:
            return
        if frame.errors:
            self._receive_some(parts)
        else:
            receive_all(self._sock, _views(parts))
        frame.close()  # before the answer: who hears it may ask for the memory
        send_all(self._sock, [_done(header, frame)])

    def _receive_some(self, parts: list[Part]) -> None:
        for part in parts:
            if part.span:
                receive_all(self._sock, views([part.span]))
                continue
            for at in range(0, part.length, NOWHERE):
                receive_all(self._sock, [self._nowhere[: min(NOWHERE, part.length - at)]])

    def _pull(self, header: Header, frame: Frame) -> None:
        for part in frame.admit(reading=False):
            if self._ending:
                return
            if part.span is not None:
                try:
                    self._copy(frame.table[part.source], part, part.span)
                except MooncakeError as e:
                    frame.errors.update(dict.fromkeys(range(part.number, part.number + part.pieces), e))
        frame.close()
        send_all(self._sock, [_done(header, frame)])

    def _copy(self, source: SegmentRef, part: Part, span: Span) -> None:
        memory = self._mapper(self.greeting, source)
        memory.check(part.source_offset, part.length)
        copy(span[0].address + span[1], memory.address + part.source_offset, part.length)


def _views(parts: list[Part]) -> list[memoryview]:
    return views(part.span for part in parts if part.span)


def _done(header: Header, frame: Frame) -> bytes:
    return pack(Kind.DONE, header.tag, pack_errors(frame.errors))
