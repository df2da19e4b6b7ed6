"""Spans of an attempt, with a status also for those that were cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import Span, Status, StatusCode

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
