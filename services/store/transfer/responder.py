"""The target's end of one data stream: a thread that answers READ, WRITE, PULL and VERIFY frames.

A READ is pinned, then checked (both by the guard, ``pin_first``), then copied out. A WRITE is checked before a byte
of it is received (``token``); what is refused is drained into nowhere. The guard's contexts last while bytes move,
and the thread's end is what ``destroy_endpoints`` waits for (``join_receivers``).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from services.store.transfer.base import Guard
from services.store.transfer.copying import copy
from services.store.transfer.handshake import Hello
from services.store.transfer.segments import Memory, Segment, Segments
from services.store.transfer.sockets import block, receive_all, receive_body, receive_header, send_all, sever
from services.store.transfer.spans import Span, views
from services.store.transfer.wire import KIB, Header, Kind, Range, SegmentRef, pack, pack_errors, parse_ranges
from shared.errors import InternalError, MooncakeError, PeerGone, ProtocolError

STALLED = 10.0
NOWHERE = 256 * KIB


Mapper = Callable[[Hello, SegmentRef], Memory]


class Frame(ExitStack):
    """A frame's ranges with what they hold while it is served: segments in use, guards entered."""

    def __init__(self, segments: Segments, guard: Guard, greeting: Hello, body: bytes) -> None:
        super().__init__()
        self.table, self.ranges = parse_ranges(body)
        self.errors: dict[int, MooncakeError] = {}
        self._segments = segments
        self._guard = guard
        self._peer = greeting.me
        self._held: dict[int, Segment | MooncakeError] = {}

    def admit(self, reading: bool) -> list[Span | None]:
        """The span of each range that may be moved, None where ``errors`` says why not."""
        ask = self._guard.reading if reading else self._guard.writing
        return [self._admit(index, item, ask) for index, item in enumerate(self.ranges)]

    def _admit(self, index: int, item: Range, ask: Callable[..., AbstractContextManager[None]]) -> Span | None:
        try:
            segment = self._segment(item.segment)
            segment.check(item.offset, item.length)
            self.enter_context(ask(self._peer, segment.name, item.offset, item.length, item.grant))
        except MooncakeError as e:
            self.errors[index] = e
            return None
        except Exception as e:  # a guard with a bug refuses, it does not take the stream down
            self.errors[index] = InternalError(f"guard failed: {e!r}")
            return None
        return segment, item.offset, item.length

    def _segment(self, index: int) -> Segment:
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = self._use(self.table[index])
        if isinstance(held, MooncakeError):
            raise held
        return held

    def _use(self, ref: SegmentRef) -> Segment | MooncakeError:
        try:
            segment = self._segments.use(ref.name, ref.instance)
        except MooncakeError as e:
            return e
        self.callback(self._segments.let_go, segment)
        return segment


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
        self._nowhere = memoryview(bytearray(NOWHERE))
        self.thread = threading.Thread(target=self._run, name="transfer-serve", daemon=True)

    def destroy(self) -> None:
        self._ending = True
        sever(self._sock)

    def _run(self) -> None:
        try:
            block(self._sock, STALLED)
            while not self._ending:
                self._serve(self._next())
        except (OSError, MooncakeError):
            pass  # the initiator sees the end of the stream and reports it
        finally:
            self._sock.close()
            self._on_end(self)

    def _next(self) -> Header:
        while not self._ending:
            try:
                self._sock.recv(1, socket.MSG_PEEK)  # idle for as long as it likes; a frame once begun may not stall
            except BlockingIOError:
                continue
            return receive_header(self._sock)
        raise PeerGone("the stream was destroyed")

    def _serve(self, header: Header) -> None:
        body = receive_body(self._sock, header)
        serve = {Kind.READ: self._read, Kind.WRITE: self._write, Kind.PULL: self._pull, Kind.VERIFY: self._verify}
        if header.kind not in serve:
            raise ProtocolError(f"{header.kind.name} on a data stream")
        with Frame(self._segments, self._guard, self.greeting, body) as frame:
            serve[header.kind](header, frame)

    def _read(self, header: Header, frame: Frame) -> None:
        spans = [span for span in frame.admit(reading=True) if span]
        send_all(self._sock, [_done(header, frame), *views(spans)])

    def _verify(self, header: Header, frame: Frame) -> None:
        frame.admit(reading=True)
        send_all(self._sock, [_done(header, frame)])

    def _write(self, header: Header, frame: Frame) -> None:
        spans = frame.admit(reading=False)
        if self._ending:
            return
        if frame.errors:
            self._receive_some(frame, spans)
        else:
            receive_all(self._sock, views([span for span in spans if span]))
        frame.close()  # before the answer: who hears it may ask for the memory
        send_all(self._sock, [_done(header, frame)])

    def _receive_some(self, frame: Frame, spans: list[Span | None]) -> None:
        for item, span in zip(frame.ranges, spans, strict=True):
            if span:
                receive_all(self._sock, views([span]))
                continue
            for at in range(0, item.length, NOWHERE):
                receive_all(self._sock, [self._nowhere[: min(NOWHERE, item.length - at)]])

    def _pull(self, header: Header, frame: Frame) -> None:
        spans = frame.admit(reading=False)
        for index, (item, span) in enumerate(zip(frame.ranges, spans, strict=True)):
            if self._ending:
                return
            if span is not None:
                try:
                    self._copy(frame.table[item.source], item, span)
                except MooncakeError as e:
                    frame.errors[index] = e
        frame.close()
        send_all(self._sock, [_done(header, frame)])

    def _copy(self, source: SegmentRef, item: Range, span: Span) -> None:
        memory = self._mapper(self.greeting, source)
        memory.check(item.source_offset, item.length)
        copy(span[0].address + span[1], memory.address + item.source_offset, item.length)


def _done(header: Header, frame: Frame) -> bytes:
    return pack(Kind.DONE, header.tag, pack_errors(frame.errors))
