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
    """The target's end: runs the handler, a task a call, ``most`` of them at a time; further ones are refused, not
    left to wait, since those that run may be waiting for what they say. Who does not read its answers is not heard."""

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
            work = self._call(body)
        elif header.kind is Kind.REAP:
            work = self._reap(parse_ids(body))
        else:
            return super().heard(header, body)
        task = asyncio.get_running_loop().create_task(self._answer(header.tag, work))
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
        except MooncakeError as e:
            kind, body = Kind.FAULT, pack_fault(e)
        except Exception as e:  # a handler's bug is the caller's error, not the end of the connection
            kind, body = Kind.FAULT, pack_fault(InternalError(f"the handler failed: {e!r}"))
        try:
            self.say(kind, tag, body)
        except ProtocolError as e:  # an answer over the limit
            self.say(Kind.FAULT, tag, pack_fault(e))

    async def _call(self, payload: bytes) -> tuple[Kind, bytes]:
        if self._on_call is None:
            raise ProtocolError("this agent answers no calls")
        return Kind.ANSWER, await self._on_call(self.peer, payload)

    async def _reap(self, streams: list[int]) -> tuple[Kind, bytes]:
        await self._reaper(self.peer, streams)
        return Kind.REAPED, b""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for task in self._tasks:
            task.cancel()
        self._on_end(self)


async def attach(sock: socket.socket, channel: Channel) -> None:
    """Hand a socket that has shaken hands over to the loop."""
    if isinstance(sock, ssl.SSLSocket):
        TlsTransport(sock, channel)
        return
    sock.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
