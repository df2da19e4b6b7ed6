"""A traced request has spans at both agents of a fetch and of a stream; one that is not traced costs them nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from services.store import peer_messages as peer
from services.store import trace_context
from services.store.client import StoreClient
from services.store.streamer import Streamer
from services.store.trace_context import MAX_CARRIED, carried_by
from shared.engines.base import LandingTarget, Owner, PoolClass, Run

OWNER = Owner("request/1")
Key = Callable[[object], bytes]
LEASE = peer.Lease("slab", b"k" * 16, 0, 4, 4096, [7])
LANDED = peer.Landed("slab", 5, [(0, 0, 4, 0, 16)])
CONTEXT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Spans:
    def __init__(self, tracer: Tracer, exporter: InMemorySpanExporter) -> None:
        self.tracer = tracer
        self.all = exporter.get_finished_spans

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all() if span.name == name]
        return span

    def parent(self, name: str) -> str:
        """Name of the span's parent."""
        above = self.named(name).parent
        assert above is not None
        return next(
            span.name for span in self.all() if span.context is not None and span.context.span_id == above.span_id
        )

    async def until(self, name: str) -> None:
        async with asyncio.timeout(100):
            while name not in [span.name for span in self.all()]:
                await asyncio.sleep(0.005)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace_context, "tracer", lambda: provider.get_tracer("test"))
    yield Spans(provider.get_tracer("test"), exporter)
    provider.shutdown()


async def put(client: StoreClient, keys: list[bytes]) -> None:
    held = await client.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)
    await client.release(await client.commit(held, b"", keys))


async def stream(start_agent: Any, connect: Any, tracer: Tracer | None) -> None:
    """A landing, a stream into it, traced by ``tracer``."""
    prefill, decode = await connect(await start_agent()), await connect(await start_agent())
    (source,) = await prefill.allocate(1, OWNER, PoolClass.PREFILL, 100.0)

    async def go() -> None:
        landing = await decode.open_landing([], 1, 16, prefill.agent, OWNER, 100.0)
        target = LandingTarget(decode.agent, landing.token, [held.slot for held in landing.held])
        assert await prefill.stream(target, [Run(source.slot, 0, 0, 4, 0, 16)], OWNER, 100.0)
        assert not await decode.missing(landing, 100.0)

    if tracer is None:
        return await go()
    with tracer.start_as_current_span("request"):
        await go()


async def test_a_fetch_has_a_span_at_its_source(start_agent: Any, connect: Any, key: Key, spans: Spans) -> None:
    a, b = await start_agent(), await start_agent()
    owner, reader = await connect(a), await connect(b)
    await put(owner, [key(0), key(1)])
    with spans.tracer.start_as_current_span("request"):
        fetched = await reader.fetch([key(0), key(1), key(2)], b"", [a.ref.id], OWNER, PoolClass.PREFILL, 100.0)
    assert [one.error for one in fetched] == ["", "", "absent"]
    await spans.until("store.fetch")
    assert spans.parent("store.fetch") == "request"
    sources = [span for span in spans.all() if span.name == "store.source"]
    leases = [span for span in spans.all() if span.name == "store.lease"]
    assert leases and {s.parent.span_id for s in leases if s.parent} <= {
        s.context.span_id for s in sources if s.context
    }
    said = dict(leases[0].attributes or {})
    assert said["mooncake.reader"] == b.ref.id and said["mooncake.blocks"] == 3 and said["mooncake.found"] == 2


async def test_a_stream_has_spans_where_it_lands(start_agent: Any, connect: Any, spans: Spans) -> None:
    await stream(start_agent, connect, spans.tracer)
    await spans.until("store.stream")
    assert (spans.parent("store.landing"), spans.parent("store.stream")) == ("request", "request")
    assert spans.parent("store.landed") == "store.stream"
    assert dict(spans.named("store.landed").attributes or {})["mooncake.missing"] == 0


async def test_what_is_not_traced_has_no_spans_and_carries_no_context(
    start_agent: Any, connect: Any, key: Key, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    encode = peer.encode

    def spy(value: Any) -> bytes:
        sent.append(value)
        return encode(value)

    monkeypatch.setattr(peer, "encode", spy)
    await stream(start_agent, connect, None)
    a, b = await start_agent(), await start_agent()
    owner, reader = await connect(a), await connect(b)
    await put(owner, [key(0)])
    await reader.fetch([key(0)], b"", [a.ref.id], OWNER, PoolClass.PREFILL, 100.0)
    calls = [one for one in sent if isinstance(one, peer.Lease | peer.Landed)]
    assert {type(one) for one in calls} == {peer.Lease, peer.Landed}
    assert not spans.all() and not any(one.trace for one in calls)


async def test_a_stream_that_is_given_up_ends_its_span_with_a_status(
    start_agent: Any, connect: Any, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = asyncio.Event()

    async def move(*_: object) -> int:
        moving.set()
        await asyncio.sleep(1)
        return 0

    monkeypatch.setattr(Streamer, "_move", move)
    streaming = asyncio.create_task(stream(start_agent, connect, spans.tracer))
    await moving.wait()
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)
    await spans.until("store.stream")
    assert spans.named("store.stream").status.description == "cancelled"


# -- the wire ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [LEASE, LANDED])
def test_a_call_that_is_not_traced_is_not_a_byte_longer(call: peer.Lease | peer.Landed) -> None:
    body = msgspec.msgpack.decode(peer.encode(call)[1:])
    assert "trace" not in body
    traced = msgspec.structs.replace(call, trace=CONTEXT)
    assert peer.decode_call(peer.encode(traced)) == traced
    assert peer.decode_call(peer.encode(call)) == call


def test_agents_from_before_are_understood_and_understand() -> None:
    """They sent every field, and knew no trace."""

    class Lease(msgspec.Struct, frozen=True, tag="lease"):
        segment: str
        keys: bytes
        first_layer: int
        last_layer: int
        carry: int = 0
        over: list[int] = []

    class Landed(msgspec.Struct, frozen=True, tag="landed"):
        segment: str
        token: int
        spans: list[tuple[int, int, int, int, int]]

    for call, kind in ((LEASE, Lease), (LANDED, Landed), (peer.Lease("slab", b"", 0, 1), Lease)):
        fields = {name: getattr(call, name) for name in kind.__struct_fields__}
        assert peer.decode_call(peer.encode(kind(**fields))) == call
        for sent in (call, msgspec.structs.replace(call, trace=CONTEXT)):
            assert msgspec.msgpack.decode(peer.encode(sent)[1:], type=kind) == kind(**fields)


@pytest.mark.parametrize("carried", [{}, {"traceparent": "x" * MAX_CARRIED}, {"baggage": "a=b," * MAX_CARRIED}])
def test_no_context_and_too_much_of_it_are_none(carried: dict[str, str]) -> None:
    assert carried_by(carried) is None
