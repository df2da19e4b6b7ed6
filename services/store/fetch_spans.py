"""What spans tell of a fetch: that others brought it, and what came from whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span

from services.store.peer_messages import Leased
from services.store.reader import Outcome
from shared.telemetry import tracer


@contextmanager
def awaited(trace: Context | None, others: Sequence[Span]) -> Iterator[None]:
    """A span in the asker's trace while the fetches of ``others`` bring what it wants, linked to them."""
    links = [Link(span.get_span_context()) for span in others if span.is_recording()]  # kept in memory: also unsent
    if trace is None or not links:
        yield
        return
    with tracer().start_as_current_span("store.fetch shared", trace, links=links):
        yield


def describe(span: Span, outcomes: Iterable[Outcome]) -> None:
    """What came from one source, and how."""
    if not span.is_recording():
        return
    came = [outcome for outcome in outcomes if not outcome.error]
    span.set_attribute("mooncake.found", len(came))
    span.set_attribute("mooncake.bytes", sum(outcome.bytes for outcome in came))
    span.set_attribute("mooncake.transport", ",".join(sorted({outcome.transport for outcome in came})))


def describe_lease(span: Span, leased: Leased) -> None:
    """What of the blocks was there, and what of them went along with the answer."""
    if not span.is_recording():
        return
    found = [block for block in leased.blocks if block is not None]
    span.set_attribute("mooncake.found", len(found))
    span.set_attribute("mooncake.carried_bytes", sum(block.size for block in found if block.data is not None))
