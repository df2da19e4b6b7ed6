"""The control stream between two agents: calls and their answers, on the loop, over a socket that has shaken hands."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

from services.store.transfer.base import CallHandler
from services.store.transfer.tls_transport import TlsTransport
from services.store.transfer.wire import Header, Kind, Parser, pack, pack_fault, pack_ids, parse_fault, parse_ids
from shared.errors import Contended, DeadlineExceeded, InternalError, MooncakeError, PeerGone, ProtocolError
from shared.messages import Ref

Reaper = Callable[[Ref, list[int]], Awaitable[None]]


class Channel(asyncio.Protocol):
    """Frames in and out. A malformed one ends the connection."""

    def __init__(self) -> None:
        self.closed = False
        self._parser = Parser()
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()

    def pause_writing(self) -> None:
        """The other side does not read."""
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for header, body in self._parser.feed(data):
                self.heard(header, body)
        except ProtocolError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._room.set()

    def heard(self, header: Header, body: bytes) -> None:
        raise ProtocolError(f"{header.kind.name} on a control stream")

    def say(self, kind: Kind, tag: int, body: bytes = b"") -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(pack(kind, tag, body))

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


class Caller(Channel):
    """The initiator's end."""

    def __init__(self) -> None:
        super().__init__()
        self._tag = 0
        self._asked: dict[int, asyncio.Future[bytes]] = {}

    @property
    def asking(self) -> bool:
        return bool(self._asked)

    async def call(self, payload: bytes, timeout: float) -> bytes:
        return await self._ask(Kind.CALL, payload, timeout)

    async def reap(self, streams: list[int], timeout: float) -> None:
        """Returns when nothing of these streams of ours can land at the target any more."""
        await self._ask(Kind.REAP, pack_ids(streams), timeout)

    async def _ask(self, kind: Kind, body: bytes, timeout: float) -> bytes:
        self._tag = tag = (self._tag + 1) & 0xFFFFFFFF
        answer = self._asked[tag] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._room.wait()
                if self.closed:
                    raise PeerGone("the control connection is closed")
                self.say(kind, tag, body)
                answered: bytes = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {timeout:g} s") from None
        finally:
            self._asked.pop(tag, None)
        return answered

    def heard(self, header: Header, body: bytes) -> None:
        if header.kind not in (Kind.ANSWER, Kind.FAULT, Kind.REAPED):
            super().heard(header, body)
        answer = self._asked.get(header.tag)
        if answer is None or answer.done():
            return  # it was not waited for any longer
        if header.kind is Kind.FAULT:
            answer.set_exception(parse_fault(body))
        else:
            answer.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PeerGone("the control connection was lost"))


class Callee(Channel):
    """The target's end: runs the handler, a task for each call that has to wait, ``most`` of them at a time; further
    ones are refused, not left to wait, since those that run may be waiting for what they say. Who does not read its
    answers is not heard."""

    def __init__(
        self, peer: Ref, on_call: CallHandler | None, reaper: Reaper, on_end: Callable[[Callee], None], most: int
    ) -> None:
        super().__init__()
        self._most = most
        self.peer = peer
        self._on_call = on_call
        self._reaper = reaper
        self._on_end = on_end
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, header: Header, body: bytes) -> None:
        if header.kind in (Kind.CALL, Kind.REAP) and len(self._tasks) >= self._most:
            return self.say(Kind.FAULT, header.tag, pack_fault(Contended(f"{self._most} calls are being answered")))
        if header.kind is Kind.CALL:
            self._call(header.tag, body)
        elif header.kind is Kind.REAP:
            self._spawn(header.tag, self._reap(parse_ids(body)))
        else:
            super().heard(header, body)

    def _call(self, tag: int, payload: bytes) -> None:
        if not self._room.is_set():  # it was sent before the caller was no longer heard
            return self._spawn(tag, self._call_later(payload))
        try:
            answer = self._ask_handler(payload)
        except Exception as e:
            return self._answered(tag, *_fault(e))
        if isinstance(answer, bytes):
            self._answered(tag, Kind.ANSWER, answer)
        else:
            self._spawn(tag, _as_answer(answer))

    def _ask_handler(self, payload: bytes) -> Awaitable[bytes] | bytes:
        if self._on_call is None:
            raise ProtocolError("this agent answers no calls")
        return self._on_call(self.peer, payload)

    def _spawn(self, tag: int, work: Awaitable[tuple[Kind, bytes]]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(tag, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._transport is not None:
            self._transport.resume_reading()

    async def _answer(self, tag: int, work: Awaitable[tuple[Kind, bytes]]) -> None:
        try:
            kind, body = await work
        except Exception as e:
            kind, body = _fault(e)
        self._answered(tag, kind, body)

    def _answered(self, tag: int, kind: Kind, body: bytes) -> None:
        try:
            self.say(kind, tag, body)
        except ProtocolError as e:  # an answer over the limit
            self.say(Kind.FAULT, tag, pack_fault(e))

    async def _call_later(self, payload: bytes) -> tuple[Kind, bytes]:
        while not self._room.is_set():  # those that woke before may have filled it again
            await self._room.wait()
        answer = self._ask_handler(payload)
        return Kind.ANSWER, answer if isinstance(answer, bytes) else await answer

    async def _reap(self, streams: list[int]) -> tuple[Kind, bytes]:
        await self._reaper(self.peer, streams)
        return Kind.REAPED, b""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for task in self._tasks:
            task.cancel()
        self._on_end(self)


async def _as_answer(answer: Awaitable[bytes]) -> tuple[Kind, bytes]:
    return Kind.ANSWER, await answer


def _fault(error: Exception) -> tuple[Kind, bytes]:
    """A handler's bug is the caller's error, not the end of the connection."""
    ours = error if isinstance(error, MooncakeError) else InternalError(f"the handler failed: {error!r}")
    return Kind.FAULT, pack_fault(ours)


async def attach(sock: socket.socket, channel: Channel) -> None:
    """Hand a socket that has shaken hands over to the loop."""
    if isinstance(sock, ssl.SSLSocket):
        TlsTransport(sock, channel)
        return
    sock.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
