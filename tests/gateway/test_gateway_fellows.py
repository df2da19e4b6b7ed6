"""A trace is found whichever conductor is asked, by the request's own tenant, and with that request's spans alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from services.conductor import fellows
from services.conductor.fellows import Fellows
from services.conductor.gateway.exchange import Exchange
from services.conductor.gateway.traces import Traces, of_request
from shared.api_keys import Tenant
from shared.errors import Unavailable
from shared.memory_bus import MemoryBus
from shared.messages import Ref
from shared.recent_spans import RecentSpans
from shared.records import ConductorRecord
from shared.span_record import SpanRecord

CLIENT = SpanContext(0xABC, 0x1, True, TraceFlags(1))


class Conductor:
    """What of a conductor remembers traces and finds those of others."""

    def __init__(self, network: MemoryBus, id: str, registered: Callable[[], list[ConductorRecord]]) -> None:
        async def conductors() -> list[ConductorRecord]:
            return registered()

        self.ref = Ref(id, 1)
        self.recent = RecentSpans(8)
        provider = TracerProvider()
        provider.add_span_processor(self.recent)
        self.tracer = provider.get_tracer("test")
        self.fellows = Fellows(network.join(id), self.ref, conductors)
        self.traces = Traces(list, self.fellows, lambda: self.recent)

    def serve(self, unique: str, tenant: str, id: str = "", client: SpanContext | None = None) -> None:
        """A request from its first byte to its last."""
        parent = trace.set_span_in_context(NonRecordingSpan(client)) if client else None
        with self.tracer.start_as_current_span("POST", parent, SpanKind.SERVER) as span:
            self.traces.name(Exchange(unique, id or unique, "r", 0.0, tenant=Tenant(tenant), span=span))
            with self.tracer.start_as_current_span(f"attempt of {unique}"):
                pass


class Conductors:
    def __init__(self) -> None:
        self.network = MemoryBus()
        self.up = True
        self.all = [Conductor(self.network, f"c{i}", self.registered) for i in range(3)]

    def registered(self) -> list[ConductorRecord]:
        if not self.up:
            raise Unavailable("Redis is away")
        return [ConductorRecord(ref=one.ref, node="n", url="http://x") for one in self.all]

    async def open(self) -> Conductors:
        for one in self.all:
            await one.fellows.serve(one.traces.here)
        return self


@pytest.fixture
async def conductors() -> Conductors:
    return await Conductors().open()


async def names(asked: Conductor, request: str, tenant: str) -> list[str]:
    async with asked.traces:
        traced = await asked.traces.of(request, tenant)
    return [span.name for span in traced.spans] if traced else []


async def test_any_conductor_finds_what_another_served(conductors: Conductors) -> None:
    conductors.all[1].serve("abc", "one", "mine")
    for asked in conductors.all:
        for id in ("abc", "cmpl-abc", "mine"):
            assert sorted(await names(asked, id, "one")) == ["POST", "attempt of abc"]
        assert await names(asked, "cmpl-mine", "one") == [], "an id that the client made up is as the client wrote it"


async def test_another_tenants_request_is_found_nowhere(conductors: Conductors) -> None:
    conductors.all[1].serve("abc", "one", "mine")
    for asked in conductors.all:
        assert await names(asked, "abc", "two") == await names(asked, "mine", "two") == []
        assert await names(asked, "abc", "") == []


async def test_no_tenants_name_can_be_continued_into_another_s(conductors: Conductors) -> None:
    conductors.all[1].serve("abc", "one/more", "mine")
    for asked in conductors.all:
        assert await names(asked, "mine", "one/more")
        for id in ("more/abc", "more/mine", "more/their mine", "their mine"):
            assert await names(asked, id, "one") == []


async def test_a_trace_that_the_client_named_shows_each_tenant_its_own_part(conductors: Conductors) -> None:
    served = conductors.all[1]
    served.serve("abc", "one", client=CLIENT)
    served.serve("def", "two", client=CLIENT)
    for asked in conductors.all:
        assert sorted(await names(asked, "abc", "one")) == ["POST", "attempt of abc"]
        assert sorted(await names(asked, "def", "two")) == ["POST", "attempt of def"]


async def test_whoever_does_not_answer_is_named_and_holds_nobody_up_for_long(
    conductors: Conductors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fellows, "TIMEOUT", 0.1)
    asked = conductors.all[0]

    async def silent(*_: object) -> None:
        await asyncio.sleep(1000)

    await conductors.network.join("stopped").serve(fellows.address(conductors.all[2].ref), silent)
    async with asked.traces:
        traced = await asked.traces.of("abc", "one")
        assert traced is not None and not traced.trace and set(traced.missing) == {"conductor c2"}
        conductors.all[1].serve("abc", "one")
        found = await asked.traces.of("abc", "one")
        assert found is not None and found.spans and not found.missing
        conductors.up = False
        lost = await asked.traces.of("other", "one")
        assert lost is not None and set(lost.missing) == {"metadata"}


def span(id: str, parent: str) -> SpanRecord:
    return SpanRecord(
        trace="t", span=id, parent=parent, name=id, kind="internal", service="s", process=1, start=0, end=1, status="ok"
    )


def test_of_a_trace_of_our_own_strays_count_too() -> None:
    """Their parents died with their process; nobody else can have put them there."""
    ours = [span("r", ""), span("a", "r"), span("stray", "lost")]
    assert of_request(ours, "r") == ours
    theirs = [span("r", "client"), span("a", "r"), span("b", "a"), span("stray", "lost"), span("q", "client")]
    assert [one.name for one in of_request(theirs, "r")] == ["r", "a", "b"]


def test_before_the_requests_own_span_has_ended_what_is_below_it_counts() -> None:
    assert [one.name for one in of_request([span("a", "r"), span("b", "a"), span("q", "x")], "r")] == ["a", "b"]
