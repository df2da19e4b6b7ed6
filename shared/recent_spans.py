"""The spans that this process ended lately, by trace: for `mooncake trace`, and for traces that turn out to matter.

Bounded in traces, in spans of a trace, and in names; nothing of it is ever waited for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from shared.span_record import SpanEvent, SpanRecord, Value

MAX_SPANS = 512
"""Spans kept of one trace: those of a long answer of several choices. The last ones stay."""

USUAL_SPANS = 64
"""Room for so many spans for each trace that is kept, all traces together: few requests have more. About 3 KB each."""

NAMES = 4
"""Names of a request, for each trace that is kept."""


STATUS = "http.response.status_code"
REFUSED = (429, 503)
"""Statuses of requests that nobody was given. Under overload most are, and what people look for is the others."""

REFUSED_SHARE = 4
"""One in so many of the traces that are kept may be of a refusal."""

APART_NS = 1_000_000_000
"""Of refusals that are not among the last ones, those stay that came so long after the one before."""


class Root(NamedTuple):
    """A request's own span, hexadecimal."""

    trace: str
    span: str


class RecentSpans(SpanProcessor):
    """``traces``: how many are kept, those without a new span for longest are forgotten first; fewer, where they are
    long. Refusals are a share of them at most: the last ones, and some of those before. ``export`` takes a span to the
    backend; None where there is none. Thread-safe."""

    def __init__(self, traces: int, export: Callable[[ReadableSpan], object] | None = None) -> None:
        self._limit = traces
        self._export = export
        self._traces: OrderedDict[int, deque[ReadableSpan]] = OrderedDict()
        self._names: OrderedDict[str, SpanContext] = OrderedDict()
        self._called: defaultdict[int, list[str]] = defaultdict(list)
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._refused: list[tuple[int, int]] = []  # (end in ns, trace), in the order of the ends
        self._spans = 0
        self._most = max(USUAL_SPANS * traces, MAX_SPANS)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Spans that are kept now."""
        return self._spans

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Only the end counts."""

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not context.is_valid:
            return
        with self._lock:
            late = context.trace_id in self._kept and not context.trace_flags.sampled
            if is_of_a_request(span):
                self._remember(context.trace_id, span)
                if span.kind is SpanKind.SERVER:
                    self._sort(context.trace_id, span.end_time or 0)
        if late:
            self._send([span])

    def _remember(self, trace: int, span: ReadableSpan) -> None:
        kept = self._traces.setdefault(trace, deque(maxlen=MAX_SPANS))
        self._spans += len(kept) < MAX_SPANS
        kept.append(span)
        self._traces.move_to_end(trace)
        while len(self._traces) > self._limit or self._spans > self._most:
            self._forget(next(iter(self._traces)))

    def _sort(self, trace: int, end: int) -> None:
        """Whether all that is known of a trace are refusals: the client may have named it for what it asked again."""
        self._refused = [one for one in self._refused if one[1] in self._traces and one[1] != trace]
        if all(is_refused(span) for span in self._traces.get(trace, ()) if span.kind is SpanKind.SERVER):
            self._refused.append((end, trace))
        if len(self._refused) > max(self._limit // REFUSED_SHARE, 1):
            gone = self._refused.pop(self._least())[1]
            self._forget(gone)
            for name in self._called.pop(gone, ()):  # or names of refusals push out others'
                del self._names[name]

    def _least(self) -> int:
        """Which refusal goes. Half of the room is for the last ones; of those before, who is far enough from the one
        before stays, so that a minute of them is left and not a second."""
        last = len(self._refused) // 2
        close = self._refused[last][0] - self._refused[last - 1][0] < APART_NS
        return last if close else 0

    def _forget(self, trace: int) -> None:
        self._spans -= len(self._traces.pop(trace, ()))

    def name(self, name: str, root: SpanContext) -> None:
        """``name``, a request's id, stands for the span ``root`` from now on."""
        with self._lock:
            self._unname(name)
            self._names[name] = root
            self._called[root.trace_id].append(name)
            while len(self._names) > NAMES * self._limit:
                self._unname(next(iter(self._names)))

    def _unname(self, name: str) -> None:
        if (root := self._names.pop(name, None)) is not None:
            self._called[root.trace_id].remove(name)
            if not self._called[root.trace_id]:
                del self._called[root.trace_id]

    def named(self, name: str) -> Root | None:
        """What ``name`` stands for; None where it is not known or forgotten."""
        with self._lock:
            root = self._names.get(name)
            known = root is not None and root.trace_id in self._traces
            return Root(format(root.trace_id, "032x"), format(root.span_id, "016x")) if root and known else None

    def records(self, trace: str) -> list[SpanRecord]:
        """What is known of it here, in the order of the ends."""
        with self._lock:
            spans = list(self._traces.get(int(trace, 16), ()))
        return [record_of(span) for span in spans]

    def keep(self, trace: str) -> int:
        """Export what the sampler left out of this trace, and what ends of it from now on. Returns how many spans."""
        number = int(trace, 16)
        with self._lock:
            if number in self._kept or self._export is None:
                return 0
            self._kept[number] = None
            _shrink(self._kept, self._limit)
            spans = [span for span in self._traces.get(number, ()) if not _sampled(span)]
        self._send(spans)
        return len(spans)

    def _send(self, spans: Iterable[ReadableSpan]) -> None:
        if self._export is not None:
            for span in spans:
                self._export(as_sampled(span))


def is_of_a_request(span: ReadableSpan) -> bool:
    """Work that several share makes traces of its own: those would push the requests' out."""
    return span.parent is not None or span.kind is SpanKind.SERVER


def is_refused(span: ReadableSpan) -> bool:
    """A request's own span, which says so."""
    return span.kind is SpanKind.SERVER and (span.attributes or {}).get(STATUS) in REFUSED


def _shrink(kept: OrderedDict[Any, Any], limit: int) -> None:
    while len(kept) > limit:
        kept.popitem(last=False)


def _sampled(span: ReadableSpan) -> bool:
    context = span.get_span_context()
    return context is not None and context.trace_flags.sampled


def as_sampled(span: ReadableSpan) -> ReadableSpan:
    """The same span with the flag that exporters look for."""
    context = span.get_span_context()
    assert context is not None
    flagged = SpanContext(
        context.trace_id, context.span_id, context.is_remote, TraceFlags(TraceFlags.SAMPLED), context.trace_state
    )
    return ReadableSpan(
        name=span.name,
        context=flagged,
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def record_of(span: ReadableSpan) -> SpanRecord:
    context, resource = span.get_span_context(), span.resource.attributes
    assert context is not None
    return SpanRecord(
        trace=format(context.trace_id, "032x"),
        span=format(context.span_id, "016x"),
        parent=format(span.parent.span_id, "016x") if span.parent else "",
        name=span.name,
        kind=span.kind.name.lower(),
        service=str(resource.get("service.name", "")),
        host=str(resource.get("host.name", "")),
        process=int(str(resource.get("process.pid", 0))),
        start=span.start_time or 0,
        end=span.end_time or 0,
        status=span.status.status_code.name.lower(),
        reason=span.status.description or "",
        attributes=_plain(span.attributes),
        events=[SpanEvent(event.name, event.timestamp, _plain(event.attributes)) for event in span.events],
        links=[(format(one.context.trace_id, "032x"), format(one.context.span_id, "016x")) for one in span.links],
    )


def _plain(attributes: Mapping[str, Any] | None) -> dict[str, Value]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in (attributes or {}).items()}
