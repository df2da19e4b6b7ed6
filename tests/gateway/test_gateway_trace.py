"""ACCEPTANCE E1, the gateway's part: one trace, under the client's, and every span ends with a status."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, AlwaysRecordSampler
from opentelemetry.trace import StatusCode

from services.conductor.gateway import completer, exchange
from services.conductor.gateway.options import GatewayOptions
from services.conductor.gateway.traces import Traces
from shared.errors import AttemptFailed
from shared.recent_spans import RecentSpans
from tests.gateway.fakes import CHAT, MODEL, Api, Script, StartApi, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    [span] = [span for span in spans.get_finished_spans() if span.name == name]
    return span


async def chat(api: Api, parent: str, **more: Any) -> int:
    headers = {"traceparent": parent, "Connection": "close"}
    async with api.http.post(api.server.url + "/v1/chat/completions", json=CHAT | more, headers=headers) as response:
        await response.read()
        return response.status


async def test_the_clients_trace_goes_on(api: Api, spans: InMemorySpanExporter) -> None:
    api.says("Paris.", cached=4)
    assert await chat(api, PARENT) == 200
    root, tokenize = named(spans, "POST /v1/chat/completions"), named(spans, "tokenize")
    assert root.context is not None and tokenize.parent is not None and root.parent is not None
    assert format(root.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(root.parent.span_id, "016x") == PARENT.split("-")[2]
    assert tokenize.parent.span_id == root.context.span_id
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["mooncake.cached_tokens"] == 4


async def test_the_clients_sampling_flag_is_respected(api: Api, spans: InMemorySpanExporter) -> None:
    assert await chat(api, UNSAMPLED) == 200
    assert spans.get_finished_spans() == ()


async def test_a_broken_traceparent_starts_a_new_trace(api: Api, spans: InMemorySpanExporter) -> None:
    assert await chat(api, "00-zz-../../x") == 200
    assert named(spans, "POST /v1/chat/completions").parent is None


async def test_the_dispatcher_works_inside_the_trace(api: Api, spans: InMemorySpanExporter) -> None:
    seen: list[int] = []

    def script(_: object) -> Script:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return Script([2], finish="stop")

    api.dispatcher.scripts = script
    await chat(api, PARENT)
    assert [format(one, "032x") for one in seen] == [PARENT.split("-")[1]]


async def test_refused_failed_and_cancelled_requests_end_their_spans(api: Api, spans: InMemorySpanExporter) -> None:
    assert await chat(api, PARENT, max_tokens=0) == 400
    refused = named(spans, "POST /v1/chat/completions")
    assert dict(refused.attributes or {})["error.type"] == "invalid_input"
    assert refused.status.status_code is StatusCode.UNSET  # the client's fault is no error of ours
    spans.clear()
    api.dispatcher.script = Script(api.ids("a"), error=AttemptFailed("gone"))
    await chat(api, PARENT, stream=True)
    assert named(spans, "POST /v1/chat/completions").status.status_code is StatusCode.ERROR
    spans.clear()
    api.dispatcher.script = Script([4], delay=60)
    response = api.http.post(
        api.server.url + "/v1/chat/completions", json=CHAT, timeout=aiohttp.ClientTimeout(total=0.1)
    )
    with pytest.raises(TimeoutError):
        await response
    await until(lambda: api.gateway.in_flight == 0)
    await until(lambda: len(spans.get_finished_spans()) > 1)
    cancelled = named(spans, "POST /v1/chat/completions")
    assert dict(cancelled.attributes or {})["error.type"] == "cancelled"
    assert cancelled.status.status_code is StatusCode.ERROR


@pytest.fixture
async def left_out(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Traces, list[ReadableSpan]]]:
    """(traces, what was sent) where the sampler wants nothing."""
    sent: list[ReadableSpan] = []
    provider = TracerProvider(AlwaysRecordSampler(ALWAYS_OFF))
    provider.add_span_processor(recent := RecentSpans(8, sent.append))
    for module in (exchange, completer):
        monkeypatch.setattr(module, "tracer", lambda: provider.get_tracer("test"))
    async with Traces(list, recent=lambda: recent) as gathering:
        yield gathering, sent
    provider.shutdown()


@pytest.mark.parametrize(
    ("limit", "objective", "sent"),
    [
        (10.0, {}, False),
        (10.0, {"x-slo-tbt-ms": "1"}, True),
        (10.0, {"x-slo-ttft-ms": "1"}, True),
        (0.001, {}, True),
        (0.0, {"x-slo-tbt-ms": "1"}, False),
    ],
)
async def test_what_was_slow_is_sent_whatever_the_sampler_says(
    start: StartApi,
    left_out: tuple[Traces, list[ReadableSpan]],
    limit: float,
    objective: dict[str, str],
    sent: bool,
) -> None:
    """Slow to the first token, or between tokens; for the limit, or for the objective of the request."""
    gathering, spans = left_out
    options = GatewayOptions(MODEL, trace_slow=limit, slo_ttft=100.0, slo_tbt=100.0)
    api = await start(options=options, traces=gathering)
    api.dispatcher.script = Script([*api.ids("slow"), 2], delay=0.01, finish="stop")
    async with api.http.post(api.server.url + "/v1/chat/completions", json=CHAT, headers=objective) as response:
        assert response.status == 200, await response.text()
        await response.read()
    api.dispatcher.script = Script([], error=AttemptFailed("gone"))
    async with api.http.post(api.server.url + "/v1/completions", json={"model": MODEL, "prompt": "x"}) as response:
        assert response.status == 502
    await until(lambda: any(span.name == "POST /v1/completions" for span in spans))  # it failed, so it is sent, later
    assert ("POST /v1/chat/completions" in [span.name for span in spans]) is sent
