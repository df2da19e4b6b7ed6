"""One data stream of an initiator: a thread that takes slices from its link, sends frames and receives the answers.

Without work it rests: until the link wakes it, or lends it. Who submits a small frame then carries it in the thread's
place, to the answer, as long as that takes no longer than to tell the thread and hear of it; or only sends it, so that
the thread wakes for the answer alone. What both touch is guarded by the link's lock; ``Link.resting`` and ``_lent`` say
whose turn it is.

Up to ``WINDOW`` frames are in flight, so that the target never waits for us between two. A payload of ours is never
sent while answers with payload are on their way: each side would wait for the other to read.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable

from services.store.transfer.batches import Slice
from services.store.transfer.flight import Answer, Frame
from services.store.transfer.link import Link
from services.store.transfer.patience import Patience
from services.store.transfer.sockets import (
    Buffers,
    is_over,
    receive_all,
    receive_in_time,
    send_all,
    send_in_time,
    send_now,
    sever,
)
from services.store.transfer.turn import Turn
from services.store.transfer.wire import HEADER, MIB, Kind, pack
from shared.errors import InternalError, MooncakeError, PeerGone
from shared.telemetry import log

WINDOW = 2
WAIT = 1
"""Milliseconds that whoever carries a frame waits for the beginning of its answer, and as many for each MiB written."""

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
        self._unsent: Buffers = ()
        self._answer: Answer | None = None
        self._expecting = False
        self._lent = False
        self._awaited = False
        self._failure: Exception | None = None
        self._patience = Patience()
        self._head = memoryview(bytearray(HEADER.size))
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events = select.epoll()
        self._events.register(sock, select.EPOLLRDHUP)
        self._events.register(self._bell, select.EPOLLIN)
        self._arrival = select.poll()
        self._arrival.register(sock, select.POLLIN)
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)
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
        self._events.close()
        self._flying.clear()
        self._on_end(self, error)

    def _step(self) -> bool:
        if self._failure is not None:
            raise self._failure
        if self._unsent:
            rest, self._unsent = self._unsent, ()
            send_all(self._sock, rest)
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
        rang = self._sleep()
        if not rang and self._is_lent():  # the connection ended: whoever it is lent to sees that, too, and rings
            self._events.unregister(self._sock)
            rang = self._sleep()
            self._events.register(self._sock, select.EPOLLRDHUP)
        with self._link.work:
            resting = self in self._link.resting
            self._link.resting.pop(self, None)
            if self._expecting:
                self._expecting = False
                self._events.modify(self._sock, select.EPOLLRDHUP)
        return rang or not resting  # else the other side ended the connection

    def _sleep(self) -> bool:
        """True: until the bell rang."""
        rang = any(fd == self._bell for fd, _ in self._events.poll())
        if rang:
            os.eventfd_read(self._bell)
        return rang

    def _is_lent(self) -> bool:
        with self._link.work:
            self._awaited = self._lent
            return self._lent

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def start(self, pieces: list[Slice]) -> bool:
        if is_over(self._sock):
            self.destroy()
            return False
        [head] = self._enter(pieces).buffers()
        rest = head[send_now(self._sock, head) :]
        if rest:
            self._unsent = [rest]
            self.wake()
        else:
            self._expecting = True
            self._events.modify(self._sock, select.EPOLLIN | select.EPOLLRDHUP)
        return True

    # -- lent --------------------------------------------------------------------------------------------------

    def lend(self) -> bool:
        self._lent = not isinstance(self._sock, ssl.SSLSocket) and self._patience.willing()
        return self._lent

    def carry(self, pieces: list[Slice]) -> bool:
        frame, answer, done = self._next(pieces), None, False
        try:
            answer = self._exchange(frame)
            done = answer is None
        except Exception as e:  # the thread ends with it, and says so
            self._failure = e
        finally:
            with self._link.work:
                self._lent = False
                if not done:
                    self._link.adopt(self, pieces)
                    self._flying.append(frame)
                    self._answer = answer
                if not done or self._link.queue or self._awaited or self.ending:
                    self.wake()
                else:
                    self._link.resting[self] = None
        return done

    def _exchange(self, frame: Frame) -> Answer | None:
        """None: all was moved and nothing refused; else what the answer is still to be."""
        turn = Turn()
        self._unsent = send_in_time(self._sock, frame.buffers(), lambda: turn.wait(self._room))
        into = frame.into() if frame.kind is Kind.READ else []
        wait = WAIT if into else WAIT + frame.bytes // MIB  # what is written is there before the answer is
        if self._unsent or not turn.wait(self._arrival, wait):
            self._patience.waited(in_vain=True)
            return Answer(frame)
        got = self._sock.recv_into(self._head, 0, socket.MSG_DONTWAIT)
        if not got:
            raise PeerGone("the peer closed the connection")
        if self._head[:got] != pack(Kind.DONE, frame.tag):
            return Answer(frame).after_head(self._head[:got])
        left = receive_in_time(self._sock, into, lambda: turn.wait(self._arrival)) if into else []
        self._patience.waited(in_vain=bool(left))
        return Answer(frame).after_all_but(left) if left else None

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
        send_all(self._sock, self._enter(slices).buffers())
        return True

    def _enter(self, slices: list[Slice]) -> Frame:
        """A frame is in flight from here on."""
        frame = self._next(slices)
        self._flying.append(frame)
        return frame

    def _next(self, slices: list[Slice]) -> Frame:
        self._tag = (self._tag + 1) & 0xFFFFFFFF
        return Frame(self._tag, slices[0].kind, slices)

    def _receive(self) -> bool:
        answer = self._answer or Answer(self._flying[0])
        while answer.wanted:
            receive_all(self._sock, answer.wanted)
            answer.filled()
        with self._link.work:
            self._landed(answer)
        return True

    def _landed(self, answer: Answer) -> None:
        """Under the lock."""
        self._answer = None
        self._link.landed(self, self._flying.popleft().slices, answer.refused)
