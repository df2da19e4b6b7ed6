"""Ranges of memory as the fewest buffers: neighbours become one, so that one system call moves them."""

from __future__ import annotations

from collections.abc import Iterable

from services.store.transfer.segments import Segment

Span = tuple[Segment, int, int]


def merge(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those that follow each other in the same memory joined."""
    merged: list[Span] = []
    for memory, offset, length in spans:
        if merged:
            last, start, size = merged[-1]
            if last is memory and start + size == offset:
                merged[-1] = (memory, start, size + length)
                continue
        merged.append((memory, offset, length))
    return merged


def views(spans: Iterable[Span]) -> list[memoryview]:
    return [memory.view(offset, length) for memory, offset, length in merge(spans)]
