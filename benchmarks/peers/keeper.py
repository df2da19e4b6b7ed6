"""A store contender: puts values from one buffer under keys, gets them into another; other processes hold them."""

from __future__ import annotations

import mmap
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from benchmarks.peers.lines import Answer, series

BUFFER = 256 << 20
LIVE = 256 << 20
"""Bytes that are in the store at one time, at most."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Buffers:
    """The client's, of ``BUFFER`` bytes each: values lie in ``source`` and are brought into ``sink``."""

    def __init__(self) -> None:
        self.source = np.frombuffer(mmap.mmap(-1, BUFFER), np.uint8)
        self.source[:] = np.random.default_rng(0).integers(0, 256, BUFFER, np.uint8)
        self.sink = np.frombuffer(mmap.mmap(-1, BUFFER), np.uint8)
        self.sink.fill(0)


class Keeper(ABC):
    """``once``: a value is as far away as it should be for its first reader only. ``pids``: all processes of the
    contender."""

    once = False

    def __init__(self, buffers: Buffers, pids: list[int]) -> None:
        self.source, self.sink = buffers.source, buffers.sink
        self.pids = pids
        self._serial = 0

    @abstractmethod
    async def put(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        """Store ``size`` bytes of ``source`` from each place. Raises where one was not stored."""

    @abstractmethod
    async def get(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        """Into ``sink`` from each place on, or kept until ``show``. Raises where one is missing."""

    def show(self, place: int, size: int) -> None:
        """Untimed: the last value of the last get is in ``sink`` now."""
        return None

    @abstractmethod
    async def remove(self, keys: Sequence[str], size: int) -> None: ...

    async def fill(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        """Put for a series of gets: untimed."""
        for key, place in zip(keys, places, strict=True):
            await self.put([key], [place], size)

    async def handle(self, request: Answer) -> Answer:
        size, count = request["size"], request["count"]
        put = request["op"] == "put"
        return await (self._puts if put else self._gets)(size, count, request["seconds"])

    def _keys(self, size: int, count: int) -> tuple[list[str], list[int]]:
        """Fresh keys, and where their values lie in the buffers."""
        first, self._serial = self._serial, self._serial + count
        numbers = range(first, first + count)
        return [f"{size}-{k}" for k in numbers], [k % (BUFFER // size) * size for k in numbers]

    async def _puts(self, size: int, count: int, seconds: float) -> Answer:
        stored: list[str] = []

        async def once() -> None:
            keys, places = self._keys(size, count)
            await self.put(keys, places, size)
            stored.extend(keys)

        try:
            return await series(once, seconds, self.pids, most=max(2, LIVE // (size * count)))
        finally:
            await self.remove(stored, size)

    async def _gets(self, size: int, count: int, seconds: float) -> Answer:
        calls = max(2, min(256, LIVE // size // count))
        keys, places = self._keys(size, calls * count)
        await self.fill(keys, places, size)
        at = 0

        async def once() -> None:
            nonlocal at
            begin, at = at % len(keys), at + count
            await self.get(keys[begin : begin + count], places[begin : begin + count], size)

        try:
            found = await series(once, seconds, self.pids, most=calls if self.once else 100_000)
            last = places[(at - 1) % len(keys)]
            self.show(last, size)
            if (self.sink[last : last + size] != self.source[last : last + size]).any():
                raise RuntimeError("the store gave other bytes back")
            return found
        finally:
            await self.remove(keys, size)
