"""Registered memory: named segments, who uses them now, and the bounds that no transfer may leave."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from services.store.transfer.base import Generations
from services.store.transfer.topology.location import check_location, host_memory
from services.store.transfer.wire import check_name
from shared.errors import InvalidInput, NotRegistered, OutOfRange, Overlap


class Memory(Protocol):
    """What a copy needs of a piece of memory, registered here or mapped from a peer."""

    address: int

    def check(self, offset: int, length: int) -> None: ...


class Segment:
    """One registration. ``instance`` tells it from an earlier one of the same name; ``users`` counts transfers in
    flight on it, at either end. Raises InvalidInput."""

    def __init__(
        self,
        name: str,
        buffer: memoryview,
        location: str,
        fd: int = -1,
        fd_offset: int = 0,
        generations: Generations | None = None,
    ) -> None:
        check_location(location)
        self.name = name
        self.location = location
        self.fd = fd
        self.fd_offset = fd_offset
        self.generations = generations
        self.instance = secrets.randbits(63) | 1
        self.memory = host_memory(buffer, location)
        self.size = len(self.memory)
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self.users = 0
        self.closing = False
        self.on_idle: list[Callable[[], None]] = []

    def check(self, offset: int, length: int) -> None:
        """Raises OutOfRange unless [offset, offset + length) is not empty and inside."""
        if length <= 0 or offset < 0 or offset + length > self.size:
            raise OutOfRange(f"[{offset}, {offset}+{length}) is not a range inside {self.name} of {self.size} bytes")

    def view(self, offset: int, length: int) -> memoryview:
        return self.memory[offset : offset + length]


class Segments:
    """All registrations of an engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Segment] = {}

    def register(self, segment: Segment) -> None:
        """Raises InvalidInput and Overlap."""
        check_name(segment.name)
        if segment.memory.readonly or not segment.size:
            raise InvalidInput("memory to register must be writable and not empty", field="buffer")
        with self._lock:
            if segment.name in self._by_name:
                raise Overlap(f"segment {segment.name} is registered already")
            for other in self._by_name.values():
                if segment.address < other.address + other.size and other.address < segment.address + segment.size:
                    raise Overlap(f"segment {segment.name} overlaps {other.name}")
            self._by_name[segment.name] = segment

    def use(self, name: str, instance: int = 0) -> Segment:
        """The segment, kept until ``let_go``. Raises NotRegistered."""
        with self._lock:
            segment = self._by_name.get(name)
            if segment is None or segment.closing or instance not in (0, segment.instance):
                raise NotRegistered(f"segment {name} is not registered", field="segment")
            segment.users += 1
            return segment

    def let_go(self, segment: Segment, count: int = 1) -> None:
        with self._lock:
            segment.users -= count
            waiting = segment.on_idle if segment.users == 0 else []
            segment.on_idle = [] if segment.users == 0 else segment.on_idle
        for idle in waiting:
            idle()

    def retire(self, name: str, on_idle: Callable[[], None]) -> Segment:
        """Refuse new uses; ``on_idle`` is called (on any thread) when nobody uses it. Raises NotRegistered."""
        with self._lock:
            segment = self._by_name.get(name)
            if segment is None:
                raise NotRegistered(f"segment {name} is not registered", field="segment")
            segment.closing = True
            busy = segment.users > 0
            if busy:
                segment.on_idle.append(on_idle)
        if not busy:
            on_idle()
        return segment

    def forget(self, segment: Segment) -> None:
        """Drop a retired segment; its memory is not referred to any more."""
        with self._lock:
            if self._by_name.get(segment.name) is segment:
                del self._by_name[segment.name]
        segment.memory = memoryview(b"")

    def names(self) -> list[str]:
        with self._lock:
            return list(self._by_name)
