"""One request's spans from all processes of the mesh, which each keep their own for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import aiohttp
import msgspec

from services.conductor.gateway.exchange import Exchange
from shared.metrics_server import recent_spans
from shared.span_record import SpanRecord

TIMEOUT = 2.0
SETTLE = 3.0
"""Seconds after an answer until even its last spans (commits, cancels) have ended."""

MAX_KEPT = 64
"""Traces that wait to be sent after all; more at once are left out: then there is no lack of them."""


class Traced(msgspec.Struct, frozen=True):
    """``GET /trace/{request}``. ``missing``: processes that did not answer, and why."""

    request: str
    trace: str
    spans: list[SpanRecord]
    missing: dict[str, str]


class Traces:
    """``addresses``: host:port of the other processes' metrics servers, as of now. ``async with``."""

    def __init__(self, addresses: Callable[[], Iterable[str]]) -> None:
        self._addresses = addresses
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    def name(self, exchange: Exchange) -> None:
        """Its trace is found by every id that people may have of the request."""
        own, trace = recent_spans(), exchange.span.get_span_context().trace_id
        if own is not None:
            for id in {exchange.id, exchange.unique, f"chatcmpl-{exchange.unique}", f"cmpl-{exchange.unique}"}:
                own.name(id, trace)

    async def of(self, request: str) -> Traced | None:
        """All spans of a request, by their start; None where nothing is known of it (any more)."""
        own = recent_spans()
        trace = own.named(request) if own is not None else ""
        if own is None or not trace:
            return None
        spans, missing = own.records(trace), {}
        decode = msgspec.json.Decoder(list[SpanRecord]).decode
        for address, answer in await self._all("GET", f"/spans/{trace}"):
            if isinstance(answer, bytes):
                spans += decode(answer)
            else:
                missing[address] = answer
        return Traced(request, trace, sorted(spans, key=lambda span: span.start), missing)

    def keep(self, trace: str) -> None:
        """Send this trace, which the sampler left out, after all: from here and from every process."""
        if len(self._tasks) < MAX_KEPT:
            task = asyncio.create_task(self._keep(trace), name="keep-trace")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _keep(self, trace: str) -> None:
        if (own := recent_spans()) is None:
            return
        own.keep(trace)
        await asyncio.sleep(SETTLE)
        await self._all("POST", f"/spans/{trace}/keep")

    async def _all(self, method: str, path: str) -> Sequence[tuple[str, bytes | str]]:
        """(address, body or what went wrong) of each process, asked at once."""

        async def one(address: str) -> tuple[str, bytes | str]:
            try:
                async with self._http.request(method, f"http://{address}{path}") as response:
                    body = await response.read()
                    return address, body if response.status == 200 else f"status {response.status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as e:
                return address, str(e) or type(e).__name__

        return await asyncio.gather(*map(one, {address for address in self._addresses() if address}))
