"""A finished span as processes tell each other of it."""

from __future__ import annotations

import msgspec

Value = str | bool | int | float | list[str | bool | int | float]


class SpanEvent(msgspec.Struct, frozen=True):
    """``at``: nanoseconds since the epoch."""

    name: str
    at: int
    attributes: dict[str, Value]


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finished span as others read it. Ids are hexadecimal, ``parent`` is "" for a root; times are nanoseconds since
    the epoch by the clock of ``host``; ``status`` is unset, ok or error; ``links`` names (trace, span)."""

    trace: str
    span: str
    parent: str
    name: str
    kind: str
    service: str
    process: int
    start: int
    end: int
    status: str
    reason: str = ""
    attributes: dict[str, Value] = {}
    events: list[SpanEvent] = []
    links: list[tuple[str, str]] = []
    host: str = ""


class Traced(msgspec.Struct, frozen=True):
    """``GET /trace/{request}``: one request's spans by their start. ``missing``: processes that did not answer, and
    why."""

    request: str
    trace: str
    spans: list[SpanRecord]
    missing: dict[str, str]
