"""Generations and pins of the slots of one slab, and the landings that may be written: what transport threads ask.

The only state that the agent's loop shares with threads. Everything is a few list operations under one lock.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

import numpy as np
import numpy.typing as npt

from shared.errors import Fenced, NotPermitted, StaleGeneration
from shared.messages import Ref


class Pins:
    """A generation and a number of readers in progress for each slot.

    ``words`` (uint64, one a slot) hold the generations, in memory that peers of this host may map. They start at a
    random number, so that a descriptor of an earlier incarnation is never right by chance.
    """

    def __init__(self, slots: int, words: npt.NDArray[np.uint64] | None = None) -> None:
        self._generations = np.zeros(slots, np.uint64) if words is None else words
        self._generations[:] = secrets.randbits(40) | 1
        self._pins = [0] * slots
        self._copies = 0
        self._lock = Lock()

    def claim(self, slot: int) -> bool:
        """Bump the generation before the first new byte (``bump_first``). False: a copy out of the slot runs now."""
        with self._lock:
            if self._pins[slot]:
                return False
            self._generations[slot] += 1
            return True

    def generation(self, slot: int) -> int:
        return int(self._generations[slot])

    @property
    def busy(self) -> bool:
        """A copy out of some slot runs now."""
        return self._copies > 0

    @contextmanager
    def pin(self, slot: int, generation: int) -> Iterator[None]:
        """Keep the slot from being claimed while a copy out of it runs. Raises StaleGeneration.

        rule: pin_first (the generation is compared under the pin; both happen under one lock).
        """
        with self._lock:
            if self._generations[slot] != generation:
                raise StaleGeneration(f"slot {slot} was reused since it was leased")
            self._pins[slot] += 1
            self._copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[slot] -= 1
                self._copies -= 1


class _Grant:
    __slots__ = ("on_idle", "slots", "writer", "writing")

    def __init__(self, writer: Ref, slots: frozenset[int]) -> None:
        self.writer = writer
        self.slots = slots
        self.writing = 0
        self.on_idle: Callable[[], None] | None = None


class WriteGrants:
    """Which landing tokens may write into which slots now, and how many of our receivers are writing for each."""

    def __init__(self) -> None:
        self._open: dict[int, _Grant] = {}
        self._closing: dict[int, _Grant] = {}
        self._lock = Lock()

    def open(self, token: int, writer: Ref, slots: Iterable[int]) -> None:
        with self._lock:
            self._open[token] = _Grant(writer, frozenset(slots))

    def widen(self, token: int, slots: Iterable[int]) -> None:
        """The writer owes these slots too."""
        with self._lock:
            grant = self._open[token]
            grant.slots = grant.slots | frozenset(slots)

    def close(self, token: int, on_idle: Callable[[], None]) -> None:
        """Refuse new writes for good; ``on_idle`` is called, perhaps from a thread, once no receiver of ours writes
        any more (``join_receivers``). Idempotent: an unknown token is idle."""
        with self._lock:
            grant = self._open.pop(token, None)
            if grant is not None and grant.writing:
                grant.on_idle = on_idle
                self._closing[token] = grant
                return
        on_idle()

    def busy(self, token: int) -> bool:
        """A receiver of ours writes for this token now."""
        with self._lock:
            grant = self._open.get(token) or self._closing.get(token)
            return grant is not None and grant.writing > 0

    def tokens(self, writer: Ref) -> list[int]:
        """Live tokens of that writer (``handshake``)."""
        with self._lock:
            return [token for token, grant in self._open.items() if grant.writer == writer]

    def slots(self, token: int, writer: Ref) -> frozenset[int]:
        """What the writer may write by that token now. Raises Fenced, NotPermitted."""
        with self._lock:
            return self._grant_of(token, writer).slots

    def _grant_of(self, token: int, writer: Ref) -> _Grant:
        """Under the lock. Raises Fenced, NotPermitted."""
        grant = self._open.get(token)
        if grant is None:
            raise Fenced("the landing is not open")
        if grant.writer != writer:
            raise NotPermitted("the landing belongs to another writer")
        return grant

    @contextmanager
    def write(self, token: int, writer: Ref, slots: Iterable[int]) -> Iterator[None]:
        """Around the receiving of bytes into ``slots`` (``token``). Raises Fenced, NotPermitted."""
        with self._lock:
            grant = self._grant_of(token, writer)
            if not grant.slots.issuperset(slots):
                raise NotPermitted("the landing does not cover this range")
            grant.writing += 1
        try:
            yield
        finally:
            self._wrote(token, grant)

    def _wrote(self, token: int, grant: _Grant) -> None:
        with self._lock:
            grant.writing -= 1
            done = grant.on_idle if not grant.writing else None
            if done is not None:
                del self._closing[token]
        if done is not None:
            done()
