"""One request's spans from all processes of the mesh, which each keep their own for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import aiohttp
import msgspec

from services.conductor.gateway.exchange import Exchange
from shared.metrics_server import recent_spans
from shared.span_record import SpanRecord, Traced

TIMEOUT = 2.0
SETTLE = 3.0
"""Seconds after an answer until even its last spans (commits, cancels) have ended."""

PLACED = "attempt"
"""The span of a request that was given to instances."""

MAX_KEPT = 64
"""Traces that wait to be sent after all; more at once are left out: then there is no lack of them."""


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
        """Its trace is found by every id that people may have of the request, by those of its tenant alone. An id that
        a client has made up never stands for what another one was given."""
        own, trace = recent_spans(), exchange.span.get_span_context().trace_id
        if own is not None:
            own.name(f"{exchange.tenant.name}/{exchange.unique}", trace)
            if exchange.id != exchange.unique:
                own.name(f"{exchange.tenant.name}/their {exchange.id}", trace)

    async def of(self, request: str, tenant: str) -> Traced | None:
        """All spans of this tenant's request, by their start; None where nothing is known of it (any more)."""
        own = recent_spans()
        bare = request.removeprefix("chatcmpl-").removeprefix("cmpl-")
        names = (f"{tenant}/{bare}", f"{tenant}/their {request}")
        trace = next((found for name in names if (found := own.named(name))), "") if own is not None else ""
        if own is None or not trace:
            return None
        spans = own.records(trace)
        missing: dict[str, str] = {}
        decode = msgspec.json.Decoder(list[SpanRecord]).decode
        for address, answer in await self._all("GET", f"/spans/{trace}"):
            try:
                if isinstance(answer, bytes):
                    spans += decode(answer)
                else:
                    missing[address] = answer
            except msgspec.MsgspecError as e:  # of another version
                missing[address] = str(e)
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
        if not any(span.name == PLACED for span in own.records(trace)):  # a refusal: nobody else has heard of it
            return
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
