"""Clocks of several machines in one picture: the least shifts with which no effect comes before its cause. Pure.

A child begins after its parent does, always; it ends before its parent does, nearly always: some work outlives who
asked for it. What contradicts itself is left out, the strictest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from shared.span_record import SpanRecord

SLACK = 1_000_000
"""Nanoseconds that a child may end after its parent without saying anything of clocks: a message was on its way."""

UNBOUNDED = 1 << 62


class Bound(NamedTuple):
    """The shift of ``one`` is at most ``most`` nanoseconds more than that of ``other``."""

    one: int
    other: int
    most: int


def clock_of(span: SpanRecord) -> str:
    """Processes of one machine share its clock; where it is not known, each counts for itself."""
    return span.host or f"{span.service} {span.process}"


def adjusted(spans: Sequence[SpanRecord]) -> tuple[list[SpanRecord], dict[str, int]]:
    """The same spans (parents before their children), and by how many nanoseconds the spans of which clock were
    shifted. The clock of the request's own span is right."""
    names = list(dict.fromkeys(map(clock_of, sorted(spans, key=lambda span: span.kind != "server"))))
    rows = {name: row for row, name in enumerate(names)}
    by_id = {span.span: span for span in spans}
    pairs = [(span, by_id[span.parent]) for span in spans if span.parent in by_id]
    across = [(child, parent) for child, parent in pairs if clock_of(child) != clock_of(parent)]
    starts = [bound(rows, parent, child, child.start - parent.start) for child, parent in across]
    ends = [bound(rows, child, parent, parent.end + SLACK - child.end) for child, parent in across]
    shifts = least_shifts(len(names), [*loosest_first(starts), *loosest_first(ends)])
    moved = {name: shift for name, shift in zip(names, shifts, strict=True) if shift}
    return [shifted(span, moved.get(clock_of(span), 0)) for span in spans], moved


def bound(rows: dict[str, int], one: SpanRecord, other: SpanRecord, most: int) -> Bound:
    return Bound(rows[clock_of(one)], rows[clock_of(other)], most)


def loosest_first(bounds: Iterable[Bound]) -> list[Bound]:
    return sorted(bounds, key=lambda bound: -bound.most)


def least_shifts(clocks: int, bounds: Iterable[Bound]) -> list[int]:
    """For each clock, 0 for the first. A bound that contradicts those before it is left out. Each clock in turn is
    shifted as little as the bounds allow."""
    most = [[0 if one == other else UNBOUNDED for other in range(clocks)] for one in range(clocks)]
    for one, other, limit in bounds:
        if limit < most[one][other] and limit + most[other][one] >= 0:
            tighten(most, one, other, limit)
    shifts: list[int] = []
    for clock in range(clocks):
        low = max((shift - most[known][clock] for known, shift in enumerate(shifts)), default=0)
        high = min((shift + most[clock][known] for known, shift in enumerate(shifts)), default=0)
        shifts.append(min(max(low, 0), high))
    return shifts


def tighten(most: list[list[int]], one: int, other: int, limit: int) -> None:
    """``most`` stays closed: what follows from two bounds is in it, too."""
    before = [row[one] for row in most]
    behind = list(most[other])
    for a, to_one in enumerate(before):
        for b, from_other in enumerate(behind):
            most[a][b] = min(most[a][b], to_one + limit + from_other)


def shifted(span: SpanRecord, by: int) -> SpanRecord:
    if not by:
        return span
    events = [msgspec.structs.replace(event, at=event.at + by) for event in span.events]
    return msgspec.structs.replace(span, start=span.start + by, end=span.end + by, events=events)
