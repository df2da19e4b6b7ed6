"""One request's spans from all processes of the mesh, which each keep their own for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import aiohttp
import msgspec

from services.conductor.gateway.exchange import Exchange
from shared.metrics_server import recent_spans
from shared.span_record import SpanRecord, Traced

if TYPE_CHECKING:
    from shared.recent_spans import RecentSpans

TIMEOUT = 2.0
SETTLE = 3.0
"""Seconds after an answer until even its last spans (commits, cancels) have ended."""

PLACED = "attempt"
"""The span of a request that was given to instances."""

MAX_KEPT = 64
"""Traces that wait to be sent after all; more at once are left out: then there is no lack of them."""


class Found(NamedTuple):
    """A request's trace where it was served: that conductor's own spans of it, and which one is the request's."""

    trace: str
    root: str
    spans: list[SpanRecord]


class Others(Protocol):
    async def find(self, request: str, tenant: str) -> tuple[Found | None, dict[str, str]]:
        """Asks the other conductors of the mesh. What one of them knows, and who did not answer, and why."""


def known_as(tenant: str, id: str) -> str:
    """No tenant's name can be continued into another's."""
    return f"{len(tenant)}:{tenant}/{id}"


class Traces:
    """``addresses``: host:port of the metrics servers of instances and agents, as of now. ``recent``: this process's
    own spans. ``async with``."""

    def __init__(
        self,
        addresses: Callable[[], Iterable[str]],
        others: Others | None = None,
        recent: Callable[[], RecentSpans | None] = recent_spans,
    ) -> None:
        self._addresses = addresses
        self._others = others
        self._recent = recent
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
        own, root = self._recent(), exchange.span.get_span_context()
        if own is not None:
            own.name(known_as(exchange.tenant.name, exchange.unique), root)
            if exchange.id != exchange.unique:
                own.name(known_as(exchange.tenant.name, f"their {exchange.id}"), root)

    def here(self, request: str, tenant: str) -> Found | None:
        """What this conductor knows of this tenant's request; None for one that it did not serve, or has forgotten."""
        own = self._recent()
        bare = request.removeprefix("chatcmpl-").removeprefix("cmpl-")
        names = (known_as(tenant, bare), known_as(tenant, f"their {request}"))
        root = next((found for name in names if (found := own.named(name))), None) if own is not None else None
        return Found(*root, own.records(root.trace)) if own is not None and root is not None else None

    async def of(self, request: str, tenant: str) -> Traced | None:
        """All spans of this tenant's request, by their start, whichever conductor served it. None where nothing is
        known of it (any more); without a trace where nothing is known, but somebody did not answer."""
        found, missing = self.here(request, tenant), dict[str, str]()
        if found is None and self._others is not None:
            found, missing = await self._others.find(request, tenant)
        if found is None:
            return Traced(request, "", [], missing) if missing else None
        spans, missing = list(found.spans), {}
        decode = msgspec.json.Decoder(list[SpanRecord]).decode
        for address, answer in await self._all("GET", f"/spans/{found.trace}"):
            try:
                if isinstance(answer, bytes):
                    spans += decode(answer)
                else:
                    missing[address] = answer
            except msgspec.MsgspecError as e:  # of another version
                missing[address] = str(e)
        return Traced(request, found.trace, sorted(of_request(spans, found.root), key=lambda s: s.start), missing)

    def keep(self, trace: str) -> None:
        """Send this trace, which the sampler left out, after all: from here and from every process."""
        if len(self._tasks) < MAX_KEPT:
            task = asyncio.create_task(self._keep(trace), name="keep-trace")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _keep(self, trace: str) -> None:
        if (own := self._recent()) is None:
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


def of_request(spans: Sequence[SpanRecord], root: str) -> list[SpanRecord]:
    """Those of one request. Nobody but us knows the id of a trace that we have begun; of one that the client named,
    other requests may be part, perhaps another tenant's: there only what is below the request's own span counts."""
    ours = {span.span: span for span in spans}
    if root in ours and not ours[root].parent:
        return list(spans)
    below: dict[str, list[SpanRecord]] = {}
    for span in spans:
        below.setdefault(span.parent, []).append(span)
    found = [ours[root]] if root in ours else list(below.pop(root, []))
    for span in found:
        found += below.pop(span.span, [])
    return found
