"""HTTP below the routes: deadlines on a client's bytes, and our envelope even for what is no HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import re
import select
import socket
import sys
import termios
import uuid
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from services.conductor.gateway import metrics
from services.conductor.gateway.body import clip
from services.conductor.gateway.errors import Fault, HttpError, fault_of
from shared.telemetry import log

REQUEST_ID = "X-Request-Id"
JSON = "application/json"
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_LINE = 4096  # bytes of a request line
MAX_HEADER = 16384  # bytes of a header's name, and of its value; must differ from MAX_LINE to be told from it
MAX_HEADERS = 128
SEND_BUFFER = 128 * 1024  # bytes of an answer that the kernel holds for a reader (it takes twice that, for its own use)

LOOKS = 8  # at a reader, within the time after which one that reads nothing is cut off
HANGUP_LOOK = 0.5  # seconds between two looks for a client that left while nothing is read of it

logger = log("gateway")


@dataclass(frozen=True)
class Deadlines:
    """Seconds: for a request's head, for its body, for a client to read on, and idle between requests."""

    head: float
    body: float
    stall: float
    idle: float


def request_id(claimed: str | None, fresh: str) -> str:
    """The client's own id where it is harmless. Only ever echoed: inside it names nothing."""
    return claimed if claimed is not None and SANE_ID.fullmatch(claimed) else fresh


def json_response(body: bytes, id: str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": JSON, REQUEST_ID: id} | (headers or {}))


def error_response(fault: Fault, id: str) -> web.Response:
    return json_response(fault.envelope(), id, fault.status, fault.headers())


class Connection(RequestHandler):
    """A client's connection. It is cut when a head does not get complete, or what was written is not read, and when
    the client leaves, even behind bytes that are not read yet."""

    __slots__ = ("_deadlines", "_hangup_timer", "_head_timer", "_read_at", "_stall_timer", "_unread")

    def __init__(self, server: Server, deadlines: Deadlines, **options: Any) -> None:
        super().__init__(server, **options)
        self._deadlines = deadlines
        self._head_timer: asyncio.TimerHandle | None = None
        self._hangup_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._read_at = 0.0

    def connection_lost(self, exc: BaseException | None) -> None:
        self._await_head(False)
        self._await_reader(False)
        if self._hangup_timer is not None:
            self._hangup_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._await_head(False)
        elif self._head_timer is None and self._idle():
            self._await_head(True)
        if self._hangup_timer is None:
            self._await_hangup()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The kernel keeps no more than this for a slow reader either; left alone it would grow to megabytes."""
        super().connection_made(transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_reader(False)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """For what never reached a route: bytes that are no HTTP, a head that is too long, a bug below us."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun; its connection can only be closed")
        id = uuid.uuid4().hex
        if status >= 500:
            logger.error("request failed below the routes", id=id, exc_info=exc)
            response = error_response(fault_of(exc or RuntimeError()), id)
        else:
            response = error_response(fault_of(_unreadable(exc)), id)
        response.force_close()
        return response

    def _idle(self) -> bool:
        """No request is being answered or waits to be."""
        return self._current_request is None and not self._messages

    def _await_head(self, on: bool) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self._loop.call_later(self._deadlines.head, self._head_late) if on else None

    def _await_reader(self, on: bool) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if on:
            self._unread, self._read_at = self._pending(), self._loop.time()
            self._watch_reader()

    def _watch_reader(self) -> None:
        self._stall_timer = self._loop.call_later(self._deadlines.stall / LOOKS, self._look)

    def _head_late(self) -> None:
        self._head_timer = None
        if not self._idle() or self.transport is None:
            return
        fault = fault_of(HttpError(408, "request_timeout", "the head of the request did not arrive in time"))
        body = fault.envelope()
        head = (
            f"HTTP/1.1 408 Request Timeout\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
            f"{REQUEST_ID}: {uuid.uuid4().hex}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.force_close()

    def _look(self) -> None:
        """Has the client read something, however little? If not for long enough, it is cut off."""
        self._stall_timer = None
        now, pending = self._loop.time(), self._pending()
        if pending < self._unread:
            self._read_at = now
        self._unread = pending
        if now - self._read_at < self._deadlines.stall:
            return self._watch_reader()
        metrics.STALLED.inc()
        if self.transport is not None:
            self.transport.abort()
        return None

    def _await_hangup(self) -> None:
        """The loop notices that a client left where it reads. It does not while earlier requests keep the client's next
        ones waiting; then the socket itself is asked."""
        if self.transport is not None and not self.transport.is_reading():
            self._hangup_timer = self._loop.call_later(HANGUP_LOOK, self._look_for_hangup)

    def _look_for_hangup(self) -> None:
        self._hangup_timer = None
        if self.transport is None or self.transport.is_reading():
            return
        if hung_up(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._await_hangup()

    def _pending(self) -> int:
        """Bytes of the answer that the client's side has not acknowledged, ours and the kernel's. Once writing is
        paused, what is still being written makes them more for a moment, then they only get fewer."""
        if not isinstance(self.transport, asyncio.WriteTransport):
            return 0
        sock = self.transport.get_extra_info("socket")
        queued = (
            int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder) if sock.fileno() >= 0 else 0
        )
        return self.transport.get_write_buffer_size() + queued


def hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed, or reset, its half."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


class Server(web.Server):
    """Makes :class:`Connection` objects; a handler is cancelled when its client goes away."""

    def __init__(self, handler: Any, deadlines: Deadlines) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._deadlines = deadlines

    def __call__(self) -> RequestHandler:
        return Connection(
            self,
            self._deadlines,
            loop=self._loop,
            keepalive_timeout=self._deadlines.idle,
            access_log=None,
            lingering_time=5.0,
            max_line_size=MAX_LINE,
            max_field_size=MAX_HEADER,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
        )


def _unreadable(error: BaseException | None) -> HttpError:
    """What a client is told of bytes that the parser did not take."""
    if isinstance(error, LineTooLong):
        if error.args[1] == MAX_LINE:
            return HttpError(414, "uri_too_long", f"the request line is longer than {MAX_LINE} bytes")
        return HttpError(431, "headers_too_large", f"a header is longer than {MAX_HEADER} bytes")
    reason = error.message if isinstance(error, BadHttpMessage) else ""
    if reason.startswith("Too many"):
        return HttpError(431, "headers_too_large", f"there are more than {MAX_HEADERS} headers")
    detail = f": {clip(reason.split(chr(10))[0].rstrip(':. '))}" if reason else ""
    return HttpError(400, "bad_request", f"this is no valid HTTP request{detail}")


async def read_body(request: web.BaseRequest, limit: int, deadline: float) -> bytes:
    """The body of a JSON request. Raises HttpError 415, 417, 413 (without reading it, where its length is told), 408,
    400."""
    _check_kind(request)
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    expected = request.headers.get("Expect", "").lower()
    if request.version < HttpVersion11:
        expected = ""  # as its protocol wants: it would take the interim answer for the answer
    if expected == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun by that
    elif expected:
        raise HttpError(417, "expectation_failed", "only 'Expect: 100-continue' is understood")
    try:
        async with asyncio.timeout(deadline):
            return await _read(request, limit)
    except TimeoutError:
        raise HttpError(408, "request_timeout", f"the body did not arrive within {deadline:g} s") from None
    except (web.RequestPayloadError, BadHttpMessage, ValueError) as e:
        raise HttpError(400, "bad_request", f"the body cannot be read: {type(e).__name__}") from None


def _check_kind(request: web.BaseRequest) -> None:
    if request.content_type != JSON:
        sent = clip(request.headers.get("Content-Type", "")) or "none"
        raise HttpError(415, "unsupported_media_type", f"Content-Type must be {JSON}; the request has {sent}")
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = f"the body must not be compressed; the request has the Content-Encoding {clip(coding)}"
        raise HttpError(415, "unsupported_media_type", message, accept_encoding="identity")
    transfer = request.headers.get("Transfer-Encoding", "chunked").strip(" ,").lower()
    if transfer != "chunked":
        message = f"the body must not be compressed; the request has the Transfer-Encoding {clip(transfer)}"
        raise HttpError(415, "unsupported_media_type", message, accept_encoding="identity")


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > limit:
            raise too_large(limit)
    return bytes(body)


def too_large(limit: int) -> HttpError:
    return HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")
