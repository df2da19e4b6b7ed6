"""One engine's connection: frames in, requests decoded, answers out. Its holds may outlive it (``LocalService``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from services.store.frames import FrameReader, frame
from services.store.local_messages import Aborted, Answer, AnyRequest, Failed
from services.store.mailbox import Mailbox
from services.store.slab import Slab
from shared.errors import MALFORMED, Contended, DeadlineExceeded, InternalError, MooncakeError, ProtocolError
from shared.telemetry import log

logger = log("store.local")

MAX_REQUESTS = 4096
"""Unanswered requests of one connection."""

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)


class Service(Protocol):
    def handle(self, connection: Connection, request: AnyRequest) -> Any:
        """The answer, or a coroutine of it. Raises MooncakeError."""

    def lost(self, connection: Connection) -> None:
        """The socket is closed."""


class Connection(asyncio.Protocol):
    """``id`` names its holds in the pool. ``pidfd`` is readable once the process behind it is dead."""

    def __init__(
        self, id: int, name: str, pid: int, pidfd: int, slab: Slab, mailbox: Mailbox, service: Service
    ) -> None:
        self.id = id
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self.slab = slab
        self.mailbox = mailbox
        self.said_bye = False
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._service = service
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._service.lost(self)

    def pause_writing(self) -> None:
        """An engine that does not read its answers is not heard: else they would pile up here."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._request(body)
        except ProtocolError as e:
            logger.warning("garbage on the local socket", name=self.name, pid=self.pid, error=e.message)
            self._send(Failed(0, e.to_wire()))
            self.close()

    def _request(self, body: bytes) -> None:
        try:
            request = _requests.decode(body)
        except MALFORMED as e:
            raise ProtocolError(f"not a request: {e}") from e
        try:
            value = self._service.handle(self, request)
        except Exception as e:
            self._refuse(request.id, _as_ours(e))
            return
        if isinstance(value, Coroutine):
            self._spawn(request.id, value)
        else:
            self._answer(request.id, value)

    def _spawn(self, id: int, value: Coroutine[Any, Any, Any]) -> None:
        if id in self.tasks or len(self.tasks) >= MAX_REQUESTS:
            value.close()
            self._refuse(id, Contended(f"more than {MAX_REQUESTS} unanswered requests, or one of the same id"))
            return
        task = self.tasks[id] = asyncio.create_task(self._answer_later(id, value))
        task.add_done_callback(lambda done: self._answered(id, value, done))

    def _answered(self, id: int, value: Coroutine[Any, Any, Any], done: asyncio.Task[None]) -> None:
        del self.tasks[id]
        if done.cancelled():
            value.close()  # it may not have begun
            self._refuse(id, DeadlineExceeded("given up by the asker"))

    async def _answer_later(self, id: int, value: Coroutine[Any, Any, Any]) -> None:
        try:
            self._answer(id, await value)
        except Exception as e:
            self._refuse(id, _as_ours(e))

    def give_up(self, id: int) -> None:
        """The asker does not wait for this request any more. What it was granted meanwhile is answered all the same."""
        task = self.tasks.get(id)
        if task is not None:
            task.cancel()

    def _answer(self, id: int, value: Any) -> None:
        if id:  # else nobody waits
            self._send(Answer(id, msgspec.Raw(_encode(value))))

    def _refuse(self, id: int, error: MooncakeError) -> None:
        if id:
            self._send(Failed(id, error.to_wire()))

    def aborted(self, owner: str) -> None:
        """Tell the engine that a request of its has to give way."""
        self._send(Aborted(owner))

    def _send(self, message: Answer | Failed | Aborted) -> None:
        if self._transport is not None:
            self._transport.write(frame(_encode(message)))


def _as_ours(error: Exception) -> MooncakeError:
    if isinstance(error, MooncakeError):
        return error
    logger.error("a request broke", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


Handler = Callable[[Connection, Any], Any]
