"""Trace context as agents and their engines hand it on: where a request is traced; elsewhere it costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, StatusCode

from shared.telemetry import tracer

MAX_CARRIED = 4096
"""Characters of trace context that are taken over from others; longer ones count as none."""


def is_traced() -> bool:
    """Whether what happens now belongs to a trace."""
    return trace.get_current_span().get_span_context().is_valid


def carrier() -> dict[str, str]:
    """The current context for another process; empty where nothing is traced."""
    carried: dict[str, str] = {}
    if is_traced():
        propagate.inject(carried)
    return carried


def carried_by(carried: Mapping[str, str]) -> Context | None:
    """The asker's context, None where it has none."""
    if not carried or sum(len(name) + len(value) for name, value in carried.items()) > MAX_CARRIED:
        return None
    return propagate.extract(carried)


def current() -> Context | None:
    """For work that goes on in a task of its own."""
    return context.get_current() if is_traced() else None


@contextmanager
def traced(name: str, parent: Context | None, **attributes: str | int) -> Iterator[Span]:
    """A span below ``parent``; one that records nothing where there is none. Attributes get the prefix ``mooncake.``.
    A cancelled one ends with a status, too."""
    if parent is None:
        yield INVALID_SPAN
        return
    named = {f"mooncake.{key}": value for key, value in attributes.items()}
    with tracer().start_as_current_span(name, parent, attributes=named) as span:
        try:
            yield span
        except asyncio.CancelledError:
            span.set_status(StatusCode.ERROR, "cancelled")
            raise
