"""Ranges of memory as the fewest buffers: neighbours become one, so that one system call moves them."""

from __future__ import annotations

from collections.abc import Iterable

from services.store.transfer.segments import Segment

Span = tuple[Segment, int, int]


def merge(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that follow each other in the same memory joined."""
    merged: list[Span] = []
    last, start, end = None, 0, 0
    for memory, offset, length in spans:
        if memory is last and offset == end:
            end += length
            continue
        if last is not None:
            merged.append((last, start, end - start))
        last, start, end = memory, offset, offset + length
    if last is not None:
        merged.append((last, start, end - start))
    return merged


def views(spans: Iterable[Span]) -> list[memoryview]:
    return [memory.view(offset, length) for memory, offset, length in merge(spans)]
