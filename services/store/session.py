"""Requests and answers over an attached socket, on the client's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.store.frames import FrameReader, frame
from services.store.local_messages import Aborted, Answer, AnyRequest, Failed, GiveUp, Release
from shared.errors import MALFORMED, AgentGone, DeadlineExceeded, MooncakeError, ProtocolError

GRACE = 2.0
"""Seconds on top of a request's own timeout, after which the agent counts as hung."""

LINGER = 0.001
"""Seconds that holds which are over wait for a request to go with."""

_encode = msgspec.msgpack.Encoder().encode
_answers: msgspec.msgpack.Decoder[Answer | Failed | Aborted] = msgspec.msgpack.Decoder(Answer | Failed | Aborted)


@dataclass
class Pending:
    """``kind`` is the answer's type. ``undo`` gives back what came for somebody who had gone meanwhile. ``answered`` is
    called when the agent has answered, be it with a refusal, and whether or not somebody waits for it."""

    future: asyncio.Future[Any]
    kind: Any
    undo: Callable[[Any], None] | None
    answered: Callable[[], None]


class Session(asyncio.Protocol):
    """``closed`` once the agent is gone; everything that waits then raises AgentGone. ``on_abort`` hears of owners that
    have to give way."""

    def __init__(self) -> None:
        self.closed = False
        self.on_abort: Callable[[str], None] | None = None
        self._pending: dict[int, Pending] = {}
        self._next = 0
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._over: list[int] = []
        self._telling: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            if not entry.future.done():
                entry.future.set_exception(AgentGone("the store agent is gone"))

    def _end(self) -> None:
        self.closed = True
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None

    def close(self) -> None:
        self._end()
        if self._transport is not None:
            self._transport.close()

    async def ask(
        self,
        make: Callable[[int], AnyRequest],
        kind: Any,
        timeout: float = 10.0,
        undo: Callable[[Any], None] | None = None,
        answered: Callable[[], None] = lambda: None,
    ) -> Any:
        """Raises AgentGone, DeadlineExceeded, and what the agent answered with. ``make`` gets the request's id;
        ``undo`` and ``answered``: see :class:`Pending`.

        When the caller is cancelled, or the time is over, the agent is told; what it has granted is undone.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        id = self._send(make, Pending(future, kind, undo, answered))
        try:
            async with asyncio.timeout(timeout + GRACE):
                return await future
        except (TimeoutError, asyncio.CancelledError) as e:
            self._leave(id, future, undo)
            if isinstance(e, asyncio.CancelledError):
                raise
            raise DeadlineExceeded(f"the store agent did not answer within {timeout + GRACE:.1f} s") from None

    def _leave(self, id: int, future: asyncio.Future[Any], undo: Callable[[Any], None] | None) -> None:
        if future.cancelled():
            self.tell(lambda own: GiveUp(own, id))
        elif future.exception() is None and undo is not None:  # answered in the very same moment
            undo(future.result())

    def tell(self, make: Callable[[int], AnyRequest]) -> None:
        """Send without waiting; there is no answer."""
        if not self.closed and self._transport is not None:
            body = frame(_encode(make(0)))
            self._transport.write(self._released() + body)

    def release(self, holds: Sequence[int]) -> None:
        """Give holds back, with whatever is said next, or in a moment."""
        self._over.extend(holds)
        if self._over and self._telling is None and not self.closed:
            self._telling = asyncio.get_running_loop().call_later(LINGER, self._release_now)

    def _release_now(self) -> None:
        if not self.closed and self._transport is not None:
            self._transport.write(self._released())

    def _released(self) -> bytes:
        """A frame that ends what is to be given back, in front of whatever is sent next."""
        over, self._over = self._over, []
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        return frame(_encode(Release(0, over))) if over else b""

    def _send(self, make: Callable[[int], AnyRequest], pending: Pending) -> int:
        """The request's id."""
        if self.closed or self._transport is None:
            raise AgentGone("the store agent is gone")
        self._next += 1
        body = frame(_encode(make(self._next)))
        self._pending[self._next] = pending
        self._transport.write(self._released() + body)
        return self._next

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._answered(_answers.decode(body))
        except (*MALFORMED, ProtocolError):
            self.close()

    def _answered(self, message: Answer | Failed | Aborted) -> None:
        if isinstance(message, Aborted):
            if self.on_abort is not None:
                self.on_abort(message.owner)
            return
        entry = self._pending.pop(message.id, None)
        if entry is None:
            return
        entry.answered()
        if isinstance(message, Failed):
            if not entry.future.done():
                entry.future.set_exception(MooncakeError.from_wire(message.error))
            return
        try:
            value = msgspec.msgpack.decode(message.body, type=entry.kind)
        except MALFORMED as e:
            if not entry.future.done():
                entry.future.set_exception(ProtocolError(f"the store agent answered something else: {e}"))
            raise
        if not entry.future.done():
            entry.future.set_result(value)
        elif entry.undo is not None:
            entry.undo(value)
