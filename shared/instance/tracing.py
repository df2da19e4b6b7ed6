"""Spans of an attempt, with a status also for those that were cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, Status, StatusCode

from shared.telemetry import tracer


@contextmanager
def span(name: str, **attributes: str | int | float) -> Iterator[Span]:
    """A span under the one that the bus message came with. Attributes get the prefix ``mooncake.``."""
    named = {f"mooncake.{key}": value for key, value in attributes.items()}
    with tracer().start_as_current_span(name, attributes=named) as current:
        try:
            yield current
        except asyncio.CancelledError:
            current.set_status(Status(StatusCode.ERROR, "cancelled"))
            raise


@contextmanager
def shared_span(name: str, users: Sequence[Span], **attributes: str | int | float) -> Iterator[Span]:
    """Work that several do together belongs to none of their traces: a trace of its own, linked to each of ``users``.
    Nothing where none of those is sent."""
    links = [Link(one) for one in (user.get_span_context() for user in users) if one.trace_flags.sampled]
    if not links:
        yield INVALID_SPAN
        return
    named = {f"mooncake.{key}": value for key, value in attributes.items()}
    with tracer().start_as_current_span(name, Context(), links=links, attributes=named) as current:
        yield current
