"""One data stream of an initiator: a thread that takes slices from its link, sends frames and receives the answers.

Without work it rests: until the link wakes it, or sends a small frame in its place, so that it only wakes for the
answer. What both touch is guarded by the link's lock, and ``Link.resting`` says whose turn it is.

Up to ``WINDOW`` frames are in flight, so that the target never waits for us between two. A payload of ours is never
sent while answers with payload are on their way: each side would wait for the other to read.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.store.transfer.batches import Job, Slice
from services.store.transfer.link import Link, Refusals
from services.store.transfer.sockets import (
    is_over,
    receive_all,
    receive_body,
    receive_header,
    send_all,
    send_now,
    sever,
)
from services.store.transfer.spans import Span, views
from services.store.transfer.wire import Kind, Range, SegmentRef, pack, pack_ranges, parse_errors
from shared.errors import InternalError, MooncakeError, PeerGone, ProtocolError
from shared.telemetry import log

WINDOW = 2


@dataclass
class Frame:
    tag: int
    kind: Kind
    slices: list[Slice]


OnEnd = Callable[["Stream", MooncakeError], None]


class Stream:
    """Owns its socket. ``on_end`` is called on the thread, last of all, with what ended it."""

    def __init__(self, link: Link, sock: socket.socket, number: int, on_end: OnEnd) -> None:
        self.id = number
        self._link = link
        self._sock = sock
        self._on_end = on_end
        self.ending = False
        self._tag = 0
        self._flying: deque[Frame] = deque()
        self._unsent = memoryview(b"")
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events = select.poll()
        self._events.register(sock, select.POLLIN | select.POLLRDHUP)
        self._events.register(self._bell, select.POLLIN)
        self.thread = threading.Thread(target=self._run, name=f"transfer-{number & 0xFFFF:x}", daemon=True)

    def begin(self) -> None:
        """Start the thread. Where there is none to be had, the stream ends at once."""
        try:
            self.thread.start()
        except RuntimeError as e:
            self._end(InternalError(f"no thread for a stream: {e}"))

    def destroy(self) -> None:
        self.ending = True
        sever(self._sock)

    def _run(self) -> None:
        error: MooncakeError = PeerGone("the stream was closed")
        try:
            while self._step():
                pass
        except MooncakeError as e:
            error = e
        except OSError as e:
            error = PeerGone(f"connection lost: {e}")
        except Exception as e:  # a bug here must not leave its slices in flight for ever
            log("transfer").exception("a stream failed")
            error = InternalError(f"the stream failed: {e!r}")
        finally:
            self._end(error)

    def _end(self, error: MooncakeError) -> None:
        with self._link.work:
            self._link.resting.pop(self, None)  # nobody wakes or starts it from here on
        self._sock.close()
        os.close(self._bell)
        self._flying.clear()
        self._on_end(self, error)

    def _step(self) -> bool:
        if self._unsent:
            self._finish_sending()
        if len(self._flying) < WINDOW:
            slices = self._take()
            if slices is None:
                return bool(self._flying) and self._receive()
            if slices:
                return self._send(slices)
        return self._receive() if self._flying else self._rest()

    # -- resting -----------------------------------------------------------------------------------------------

    def _rest(self) -> bool:
        """Until woken, started, or over."""
        rang = any(fd == self._bell for fd, _ in self._events.poll())
        if rang:
            os.eventfd_read(self._bell)
        with self._link.work:
            resting = self in self._link.resting
            self._link.resting.pop(self, None)
        return rang or not resting  # else the other side ended the connection

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def start(self, pieces: list[Slice]) -> bool:
        if is_over(self._sock):
            self.destroy()
            return False
        head = self._enter(pieces)
        self._unsent = memoryview(head)[send_now(self._sock, head) :]
        if self._unsent:
            self.wake()
        return True

    def _finish_sending(self) -> None:
        rest, self._unsent = self._unsent, memoryview(b"")
        send_all(self._sock, [rest])

    # -- sending and receiving ---------------------------------------------------------------------------------

    def _take(self) -> list[Slice] | None:
        writes = all(frame.kind is not Kind.READ for frame in self._flying)
        with self._link.work:
            return self._link.take(self, not self._flying, writes)

    def _send(self, slices: list[Slice]) -> bool:
        if not self._flying and is_over(self._sock):  # it ended while we slept: nothing of these was sent
            with self._link.work:
                self._link.give_back(self, slices)
            return False
        head = self._enter(slices)
        send_all(self._sock, [head, *views(_local(slices))] if slices[0].kind is Kind.WRITE else [head])
        return True

    def _enter(self, slices: list[Slice]) -> bytes:
        """A frame is in flight from here on; its head."""
        self._tag = (self._tag + 1) & 0xFFFFFFFF
        self._flying.append(Frame(self._tag, slices[0].kind, slices))
        return pack(slices[0].kind, self._tag, _ranges(slices))

    def _receive(self) -> bool:
        header = receive_header(self._sock)
        frame = self._flying[0]
        if header.kind is not Kind.DONE or header.tag != frame.tag:
            raise ProtocolError(f"{header.kind.name} {header.tag} where the answer to {frame.tag} belongs")
        errors = parse_errors(receive_body(self._sock, header))
        refused = _refusals(frame.slices, errors) if errors else {}
        if frame.kind is Kind.READ:
            receive_all(self._sock, views(_allowed(frame.slices, refused)))
        self._flying.popleft()
        with self._link.work:
            self._link.landed(self, frame.slices, refused)
        return True


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
