"""The bus over NATS. Subject ``mc.<mesh>.i.<id>``; trace context in W3C headers; large payloads in parts.

The NATS client's own reconnecting is off: it buffers while disconnected and leaves requests hanging. Here a keeper
task dials again for ever with bounded back-off, and everything in flight fails at once with BusDown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from opentelemetry import context, propagate

from shared import bus_parts
from shared.addresses import shown
from shared.bus import Handler
from shared.bus_answer import answer, forget
from shared.errors import BusDown, DeadlineExceeded, InvalidInput, NoResponders, ProtocolError
from shared.messages import AnyMessage, decode, encode
from shared.tasks import end
from shared.telemetry import counter, gauge

log = logging.getLogger(__name__)

BACKLOG = 32 << 20  # bytes not yet taken by the socket; beyond it the bus counts as down
CONCURRENCY = 1024  # handlers in flight per served id
RETRY_FIRST, RETRY_MOST = 0.05, 2.0
PING_EVERY = 1.0  # with two unanswered the server counts as gone
DIAL_TIMEOUT = 2.0
DRAIN_TIMEOUT = 5.0
HEADER_SLACK = 64  # bytes of framing per header beyond its name and value

IN_FLIGHT = gauge("bus_in_flight", "Requests that wait for an answer, handlers that run.", ("what",))
PARTS = gauge("bus_parts_bytes", "Parts of large messages that wait for the rest.")
DROPPED = counter("bus_dropped_messages", "Messages that could not be read.")

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ERROR = "Mc-Error"  # header of an answer that is no message: the request could not be read


@dataclass
class _Link:
    """One connection's lifetime."""

    client: Client
    lost: asyncio.Event
    served: dict[str, Subscription] = field(default_factory=dict)


class NatsBus:
    """A Bus (see shared/bus.py) owned by one process and one event loop. Made by :meth:`connect`, ended by close()."""

    def __init__(self, url: str, mesh: str, *, name: str, credentials: str = "") -> None:
        self._urls = [part.strip() for part in url.split(",")]
        self._shown = shown(url)
        self._prefix = f"mc.{_checked(mesh, 'mesh')}.i."
        self._name = name
        self._credentials = credentials
        self._inbox = f"_INBOX.{secrets.token_hex(11)}."
        self._link: _Link | None = None
        self._handlers: dict[str, Handler] = {}
        self._rooms: dict[str, asyncio.Semaphore] = {}
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._callbacks: list[Callable[[bool], None]] = []
        self._parts = bus_parts.Reassembly()
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, mesh: str, *, name: str, timeout: float = 10.0, credentials: str = "") -> Self:
        """Dial ``url`` (several separated by commas). ``timeout`` seconds for the first connection, then BusDown;
        0 returns at once and leaves the dialling to the background. ``credentials``: path of a credentials file."""
        bus = cls(url, mesh, name=name, credentials=credentials)
        bus._keeper = asyncio.create_task(bus._keep(), name=f"nats-keeper-{name}")
        if timeout > 0:
            try:
                async with asyncio.timeout(timeout):
                    await bus._up.wait()
            except BaseException as e:
                await bus.close()
                if isinstance(e, TimeoutError):
                    raise BusDown(f"no NATS at {bus._shown} within {timeout:g} s") from e
                raise
        return bus

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- Bus ------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and bool(link.client.is_connected)

    def on_change(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def serve(self, id: str, handler: Handler) -> None:
        """As Bus.serve; when it returns while connected, the server knows the subscription."""
        self._handlers[_checked(id, "id")] = handler
        self._rooms.setdefault(id, asyncio.Semaphore(CONCURRENCY))
        link = self._link
        if link is not None:
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):  # lost meanwhile: the keeper does it
                await self._subscribe(link)

    async def send(self, id: str, message: AnyMessage) -> None:
        await self._publish(self._live(), self._subject(id), encode(message), "")

    async def request(self, id: str, message: AnyMessage, timeout: float) -> AnyMessage:
        link = self._live()
        self._asked += 1
        token = str(self._asked)
        reply = self._waiting[token] = asyncio.get_running_loop().create_future()
        IN_FLIGHT.labels("requests").inc()
        try:
            async with asyncio.timeout(timeout):
                await self._publish(link, self._subject(id), encode(message), self._inbox + token)
                return decode(await reply)
        except TimeoutError as e:
            raise DeadlineExceeded(f"{type(message).__name__} to {id}: no answer within {timeout:g} s") from e
        finally:
            IN_FLIGHT.labels("requests").dec()
            del self._waiting[token]
            forget(reply)

    async def close(self) -> None:
        """Stop receiving, let handlers finish (at most DRAIN_TIMEOUT), flush, disconnect. Idempotent."""
        keeper, self._keeper = self._keeper, None
        await end(keeper)
        if self._link is not None and self._link.client.is_connected:
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    await self._drain(self._link)
        await end(*self._tasks)
        self._fail_waiting()
        link, self._link = self._link, None
        if link is not None:
            await _discard(link.client)

    # -- sending --------------------------------------------------------------------------------------------

    def _live(self) -> _Link:
        link = self._link
        if link is None or not link.client.is_connected:
            raise BusDown(f"not connected to NATS at {self._shown}", retry_after_ms=1000)
        if link.client.pending_data_size > BACKLOG:
            raise BusDown("NATS takes no more bytes", retry_after_ms=1000)
        return link

    async def _publish(
        self, link: _Link, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None = None
    ) -> None:
        carrier: dict[str, str] = dict(headers or {})
        propagate.inject(carrier)
        used = sum(len(name) + len(value) + HEADER_SLACK for name, value in carrier.items())
        limit = link.client.max_payload - used
        try:
            if len(payload) <= limit:
                await link.client.publish(subject, payload, reply, carrier or None)
                return
            for part in bus_parts.split(payload, limit, secrets.token_bytes(16)):
                if link.client.pending_data_size > BACKLOG // 2:
                    await link.client.flush(timeout=DIAL_TIMEOUT)  # type: ignore[arg-type]  # seconds, any number
                await link.client.publish(subject, part, reply, carrier or None)
        except ValueError as e:
            raise InvalidInput(f"message too large: {e}") from e
        except (nats.errors.Error, OSError) as e:
            raise BusDown(f"publishing failed: {e}", retry_after_ms=1000) from e

    def _subject(self, id: str) -> str:
        return self._prefix + _checked(id, "id")

    # -- receiving ------------------------------------------------------------------------------------------

    def _whole(self, msg: Msg) -> bytes | None:
        """The payload, put together from its parts; None while some are missing or when it was garbage."""
        if not bus_parts.is_part(msg.data):
            return msg.data
        whole = self._parts.add(msg.data, asyncio.get_running_loop().time())
        PARTS.set(self._parts.held)
        return whole

    async def _on_reply(self, msg: Msg) -> None:
        reply = self._waiting.get(msg.subject[len(self._inbox) :])
        if reply is None or reply.done():
            return  # its asker has gone
        headers = msg.headers or {}
        if headers.get("Status") == "503":
            reply.set_exception(NoResponders("nobody serves that id"))
        elif _ERROR in headers:
            reply.set_exception(ProtocolError(headers[_ERROR]))
        elif (payload := self._whole(msg)) is not None:
            reply.set_result(payload)

    def _receiver(self, id: str) -> Callable[[Msg], Coroutine[Any, Any, None]]:
        async def receive(msg: Msg) -> None:
            payload = self._whole(msg)
            if payload is not None:
                await self._rooms[id].acquire()  # the subscription waits, later messages keep their order
                task = asyncio.create_task(self._handle(id, payload, msg))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        return receive

    async def _handle(self, id: str, payload: bytes, msg: Msg) -> None:
        token = context.attach(propagate.extract(msg.headers or {}))
        IN_FLIGHT.labels("handlers").inc()
        try:
            message = decode(payload)
            result = await answer(self._handlers[id], message)
            if result is not None and msg.reply:
                await self._reply(msg.reply, encode(result))
        except ProtocolError as e:
            DROPPED.inc()
            log.warning("dropped a message to %s: %s", id, e)
            if msg.reply:
                await self._reply(msg.reply, b"", {_ERROR: e.message[:200]})
        finally:
            IN_FLIGHT.labels("handlers").dec()
            self._rooms[id].release()
            context.detach(token)

    async def _reply(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        link = self._link
        if link is None or not link.client.is_connected:
            return  # the asker was told BusDown, or will ask again
        with contextlib.suppress(BusDown):
            await self._publish(link, subject, payload, "", headers)

    # -- the connection -------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause = RETRY_FIRST
        while True:
            link = await self._dial()
            if link is None:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, RETRY_MOST)
                continue
            pause = RETRY_FIRST
            self._link = link
            self._up.set()
            self._tell(True)
            await self._watch(link)
            self._link = None
            self._up.clear()
            self._fail_waiting()
            self._tell(False)
            await _discard(link.client)

    async def _dial(self) -> _Link | None:
        """A link on which everything served is subscribed, None when it could not be made."""
        client, lost = Client(), asyncio.Event()

        async def on_closed() -> None:
            lost.set()

        async def on_error(error: Exception) -> None:
            log.debug("nats: %r", error)

        try:
            async with asyncio.timeout(DIAL_TIMEOUT):
                await client.connect(
                    self._urls,
                    name=self._name,
                    allow_reconnect=False,
                    connect_timeout=DIAL_TIMEOUT,  # type: ignore[arg-type]  # seconds, any number
                    ping_interval=PING_EVERY,  # type: ignore[arg-type]
                    max_outstanding_pings=2,
                    pending_size=2 * BACKLOG,
                    user_credentials=self._credentials or None,
                    closed_cb=on_closed,
                    disconnected_cb=on_closed,
                    error_cb=on_error,
                )
                link = _Link(client, lost)
                await client.subscribe(self._inbox + "*", cb=self._on_reply)
                await self._subscribe(link)
                return link
        except (nats.errors.Error, OSError, TimeoutError) as e:
            log.debug("no NATS at %s: %r", self._shown, e)
            await _discard(client)
            return None
        except asyncio.CancelledError:
            await _discard(client)
            raise

    async def _subscribe(self, link: _Link) -> None:
        """Subscribe what is served and not yet subscribed on this link, and wait until the server knows."""
        while missing := [id for id in self._handlers if id not in link.served]:
            for id in missing:
                link.served[id] = await link.client.subscribe(self._prefix + id, cb=self._receiver(id))
            for _ in range(2):  # the client's first ping overtakes what is queued; the second comes behind it
                await link.client.flush(timeout=DIAL_TIMEOUT)  # type: ignore[arg-type]

    async def _watch(self, link: _Link) -> None:
        while link.client.is_connected:  # looked at as well: a failing close skips the client's callbacks
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await link.lost.wait()
                    return

    async def _drain(self, link: _Link) -> None:
        """Receive nothing more, let the handlers answer what was received, and see that it left."""
        for subscription in link.served.values():
            await subscription.drain()  # type: ignore[no-untyped-call]
        if self._tasks:
            await asyncio.wait(self._tasks)
        await link.client.flush(timeout=DIAL_TIMEOUT)  # type: ignore[arg-type]

    def _fail_waiting(self) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(BusDown("the connection to NATS was lost", retry_after_ms=1000))

    def _tell(self, connected: bool) -> None:
        for callback in self._callbacks:
            try:
                callback(connected)
            except Exception:
                log.exception("a bus callback failed")


def _checked(name: str, field: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{field} {name!r} may hold letters, digits, '-' and '_' only", field=field)
    return name


async def _discard(client: Client) -> None:
    """Close a connection that may be half dead; its errors interest nobody any more."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(1.0):
            await client.close()
