"""Spans that a process keeps: bounded, found by the request's names, sent when their trace turns out to matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, AlwaysRecordSampler, Sampler
from opentelemetry.trace import Span, SpanKind, Tracer, set_span_in_context

from shared.recent_spans import MAX_SPANS, USUAL_SPANS, RecentSpans


def recording(traces: int, sampler: Sampler = ALWAYS_ON) -> tuple[Tracer, RecentSpans, list[ReadableSpan]]:
    sent: list[ReadableSpan] = []
    provider = TracerProvider(AlwaysRecordSampler(sampler), Resource({"service.name": "s", "process.pid": 7}))
    spans = RecentSpans(traces, sent.append)
    provider.add_span_processor(spans)
    return provider.get_tracer("t"), spans, sent


def hexed(span: Span) -> str:
    return format(span.get_span_context().trace_id, "032x")


def test_a_span_is_told_with_all_that_it_has() -> None:
    tracer, spans, _ = recording(4)
    outermost = tracer.start_as_current_span("a", kind=SpanKind.SERVER, attributes={"n": 1, "l": ["x", "y"]})
    with outermost as a, tracer.start_as_current_span("b") as b:
        b.add_event("e", {"k": 2.5})
    inner, outer = spans.records(hexed(a))
    assert (inner.name, inner.parent, inner.service, inner.process) == ("b", outer.span, "s", 7)
    assert [(event.name, event.attributes) for event in inner.events] == [("e", {"k": 2.5})]
    assert outer.attributes == {"n": 1, "l": ["x", "y"]} and outer.parent == "" and outer.end >= inner.end


def test_only_the_last_traces_are_kept_and_found_by_name() -> None:
    tracer, spans, _ = recording(3)
    made = []
    for i in range(40):
        with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as span:
            spans.name(f"request-{i}", span.get_span_context())
        made.append(hexed(span))
    assert [bool(spans.records(trace)) for trace in made] == [False] * 37 + [True] * 3
    assert (found := spans.named("request-39")) and found.trace == made[39]
    assert spans.named("request-3") is None is spans.named("nobody")
    assert len(spans._names) <= 4 * 3, "names of what is forgotten pile up"


def test_a_name_given_before_the_first_span_has_ended_stands() -> None:
    tracer, spans, _ = recording(2)
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as slow:
        spans.name("slow", slow.get_span_context())
        for i in range(3):
            with tracer.start_as_current_span("root", context=Context(), kind=SpanKind.SERVER) as quick:
                spans.name(f"quick-{i}", quick.get_span_context())
    assert spans.named("slow") == (hexed(slow), format(slow.get_span_context().span_id, "016x"))


def refused(tracer: Tracer, spans: RecentSpans, name: str, status: int = 429, at: int = 0) -> str:
    """A request that has this status, ``at`` so many milliseconds; its trace."""
    root = tracer.start_span("root", context=Context(), kind=SpanKind.SERVER, start_time=at * 1_000_000)
    spans.name(name, root.get_span_context())
    tracer.start_span("schedule", context=set_span_in_context(root), start_time=at * 1_000_000).end(at * 1_000_000)
    root.set_attribute("http.response.status_code", status)
    root.end(at * 1_000_000)
    return hexed(root)


@pytest.mark.parametrize("status", [429, 503])
def test_refusals_push_out_no_other_request(status: int) -> None:
    """Nor its names, however many of them there are; the last ones are found."""
    tracer, spans, _ = recording(64)
    served = [refused(tracer, spans, f"served-{i}", 200) for i in range(40)]
    for i in range(5000):
        refused(tracer, spans, f"refused-{i}", status, at=20 * i)
    assert all(spans.records(trace) for trace in served)
    assert all(spans.named(f"served-{i}") for i in range(40))
    assert all(spans.named(f"refused-{i}") for i in range(5000 - 8, 5000))
    assert len(spans) == 2 * (40 + 16)
    assert len(spans._names) == 40 + 16 and not set(spans._called) - spans._traces.keys()


def test_of_refusals_before_the_last_ones_those_stay_that_are_apart() -> None:
    tracer, spans, _ = recording(64)
    made = [refused(tracer, spans, f"{i}", at=20 * i) for i in range(2000)]  # 50 a second
    left = [20 * i for i, trace in enumerate(made) if spans.records(trace)]
    assert len(left) == 16 and left[-8:] == [20 * i for i in range(1992, 2000)]
    assert all(later - sooner >= 1000 for sooner, later in pairwise(left[:8]))


def test_a_few_refusals_all_stay() -> None:
    tracer, spans, _ = recording(64)
    made = [refused(tracer, spans, f"{i}", at=i) for i in range(16)]
    assert all(spans.records(trace) for trace in made)


def test_a_trace_in_which_a_retry_was_served_is_no_refusal() -> None:
    """A client may send both under one ``traceparent``, in either order."""
    tracer, spans, _ = recording(64)
    found = []
    for statuses in ((429, 200), (200, 429)):
        parent = tracer.start_span("client", kind=SpanKind.CLIENT, context=Context())
        found.append(hexed(parent))
        for status in statuses:
            with tracer.start_as_current_span(
                "root", context=set_span_in_context(parent), kind=SpanKind.SERVER
            ) as root:
                root.set_attribute("http.response.status_code", status)
    for i in range(100):
        refused(tracer, spans, f"{i}", at=20 * i)
    assert all(len(spans.records(trace)) == 2 for trace in found)


def test_what_several_share_pushes_no_request_out() -> None:
    tracer, spans, _ = recording(2)
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as root:
        pass
    for _ in range(10):
        tracer.start_span("decode step").end()
    assert spans.records(hexed(root))


def test_asking_for_traces_that_are_not_here_leaves_nothing_behind() -> None:
    _, spans, _ = recording(4)
    for i in range(1, 100):
        spans.keep(format(i, "032x"))
    assert len(spans._kept) <= 4


def test_a_trace_does_not_grow_without_bound() -> None:
    tracer, spans, _ = recording(2)
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as root:
        for i in range(MAX_SPANS + 50):
            tracer.start_span(f"{i}").end()
    assert len(spans.records(hexed(root))) == MAX_SPANS


@pytest.mark.parametrize("sampler", [ALWAYS_OFF, ALWAYS_ON])
def test_what_the_sampler_left_out_is_sent_once_asked_for_and_nothing_twice(sampler: Sampler) -> None:
    tracer, spans, sent = recording(4, sampler)
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER) as root:
        tracer.start_span("early").end()
        spans.keep(hexed(root))
        spans.keep(hexed(root))
    left_out = sampler is ALWAYS_OFF
    assert [span.name for span in sent] == (["early", "root"] if left_out else [])
    contexts = [span.get_span_context() for span in sent]
    assert all(context is not None and context.trace_flags.sampled for context in contexts)
    assert spans.keep("0" * 31 + "1") == 0


def test_ten_thousand_requests_leave_no_more_behind_than_a_few() -> None:
    """Of all sizes, named as often as people may; in traces, spans and names."""
    tracer, spans, _ = recording(8)
    last = ""
    for i in range(10_000):
        with tracer.start_as_current_span("root", context=Context(), kind=SpanKind.SERVER) as root:
            for name in range(2):
                spans.name(f"request-{i}-{name}", root.get_span_context())
            for _ in range(i % 3 if i % 500 else 3 * USUAL_SPANS):
                tracer.start_span("x").end()
        last = hexed(root)
        assert len(spans) <= 8 * USUAL_SPANS and len(spans._traces) <= 8 and len(spans._names) <= 32
    assert len(spans) == sum(map(len, spans._traces.values()))
    assert len(spans.records(last)) == 1 + 9_999 % 3


def test_one_long_trace_after_the_other_is_whole_when_it_ends() -> None:
    tracer, spans, _ = recording(1)
    for _ in range(3):
        with tracer.start_as_current_span("root", context=Context(), kind=SpanKind.SERVER) as root:
            for _ in range(MAX_SPANS - 1):
                tracer.start_span("x").end()
        assert len(spans.records(hexed(root))) == MAX_SPANS == len(spans)
