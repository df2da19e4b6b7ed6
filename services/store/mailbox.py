"""Few bytes on their way from a client to its agent, in memory that they share: a put is one round trip."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

from services.store.memory import shared_file

SIZE = 256 << 10
"""Bytes. More are written into slots of the pool in place: their copy takes longer than a round trip."""


def mailbox_file() -> int:
    """A descriptor for both ends, the caller's to close. It takes no memory before it is used."""
    return shared_file("mailbox", SIZE)


class Mailbox:
    """One end. ``fd`` stays the caller's. The client writes, one call at a time; the agent reads while it answers that
    call, and believes nothing of what lies here but that it is bytes."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._bytes = memoryview(self._map)

    def write(self, values: Sequence[memoryview]) -> None:
        """One after the other; ``SIZE`` together at most."""
        at = 0
        for value in values:
            self._bytes[at : at + len(value)] = value
            at += len(value)

    def values(self, lengths: Sequence[int]) -> Iterator[memoryview]:
        """As they were written. ``lengths`` are positive and fit."""
        at = 0
        for length in lengths:
            yield self._bytes[at : at + length]
            at += length

    def close(self) -> None:
        """Let go of the memory, and of the descriptor that its mapping has. Idempotent."""
        self._bytes.release()
        self._map.close()
