"""One answer over HTTP: as a stream of server-sent events, or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from aiohttp import HttpVersion11, web

from services.conductor.gateway.answer import Answer
from services.conductor.gateway.errors import Fault, fault_of
from services.conductor.gateway.generations import Generations, Step
from services.conductor.gateway.http import REQUEST_ID, json_response
from services.conductor.gateway.shapes import DONE, Shape, error_event
from services.conductor.gateway.transcript import Piece
from shared.errors import DeadlineExceeded
from shared.telemetry import log

SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

logger = log("gateway")


class EventStream(web.StreamResponse):
    """Its head waits for the first event: both leave in one packet."""

    _send_headers_immediately = False


class Delivery:
    """Takes steps from ``generations``, feeds ``answer``, writes ``shape``. ``timeout``: seconds for all of it.

    ``fault`` is set when a stream that had begun ended with an error: its status was sent already. ``added``: seconds
    from a stream's first token to the socket.
    """

    def __init__(self, generations: Generations, answer: Answer, shape: Shape, id: str, timeout: float) -> None:
        self._generations = generations
        self._answer = answer
        self._shape = shape
        self._id = id
        self._timeout = timeout
        self._begun: set[int] = set()
        self.fault: Fault | None = None
        self.added = 0.0

    async def whole(self) -> web.Response:
        try:
            async with asyncio.timeout(self._timeout):
                while not self._answer.done:
                    for choice, piece in self._pieces(await self._generations.batch()):
                        self._answer.keep(choice, piece.text, self._shape.entries(piece.marks))
        except TimeoutError:
            raise self._late() from None
        return json_response(self._shape.whole(self._answer), self._id)

    async def stream(self, request: web.BaseRequest, include_usage: bool) -> web.StreamResponse:
        """The head is sent with the first token: what fails before it still gets a status of its own."""
        response = EventStream(headers=SSE | {REQUEST_ID: self._id})
        if request.version < HttpVersion11:
            response.force_close()  # without chunks only that shows where the stream ends
        try:
            async with asyncio.timeout(self._timeout):
                steps = await self._generations.batch()
                began = time.monotonic()
                events = self._events(steps)
                await response.prepare(request)
                while not self._answer.done:
                    await response.write(events)
                    self.added = self.added or time.monotonic() - began
                    events = self._events(await self._generations.batch())
            usage = self._shape.usage(self._answer.usage()) if include_usage else b""
            await response.write_eof(events + usage + DONE)
            self.added = self.added or time.monotonic() - began
        except ConnectionError:
            raise
        except Exception as error:
            await self._break_off(response, self._late() if isinstance(error, TimeoutError) else error)
        return response

    def _events(self, steps: Sequence[Step]) -> bytes:
        """One write for all tokens that were there together."""
        out = bytearray()
        for choice, piece in self._pieces(steps):
            if choice not in self._begun:
                self._begun.add(choice)
                out += self._shape.start(choice, self._answer.openings[choice])
            if piece.text or piece.marks:
                out += self._shape.text(choice, piece.text, piece.marks)
            if piece.finish:
                out += self._shape.finish(choice, piece.finish)
        return bytes(out)

    def _pieces(self, steps: Sequence[Step]) -> Iterator[tuple[int, Piece]]:
        """What each step adds to its choice; a choice that a stop string ended is cancelled."""
        now = time.monotonic()
        for step in steps:
            piece = self._answer.feed(step, now)
            if piece is None:
                continue
            if piece.finish and not step.token.output.finish:
                self._generations.end(step.choice)
            yield step.choice, piece

    async def _break_off(self, response: web.StreamResponse, error: Exception) -> None:
        """An error event and no ``[DONE]``, then the connection is closed."""
        if not response.prepared:
            raise error
        self.fault = fault_of(error)
        logger.warning("stream broken off", id=self._id, code=self.fault.code, exc_info=self.fault.code == "internal")
        response.force_close()
        await response.write_eof(error_event(self.fault))

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the answer was not complete after {self._timeout:g} s")
