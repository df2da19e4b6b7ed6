"""Whether the node's store agent answers: death by exit shows on the socket, a stopped agent only by its silence."""

from __future__ import annotations

import asyncio

from shared.engines.base import KVStore

SUSPECT_S = 3.0
"""Silence after which no new work is taken."""

DEAD_S = 10.0
"""Silence after which what runs goes elsewhere."""


class Pulse:
    """Asks the agent something cheap every ``interval`` seconds. ``silence`` is how long it owes an answer.

    Silence grows by at most ``interval`` a look: a process that was stopped itself holds that against nobody.
    """

    def __init__(self, interval: float = 1.0) -> None:
        self.silence = 0.0
        self._interval = interval
        self._looked = 0.0
        self._next = 0.0
        self._store: KVStore | None = None
        self._question: asyncio.Task[list[bool]] | None = None

    @property
    def suspected(self) -> bool:
        return self.silence > SUSPECT_S

    @property
    def dead(self) -> bool:
        return self.silence > DEAD_S

    def look(self, store: KVStore, now: float) -> None:
        """Take an answer in, ask again where it is time. ``now``: monotonic seconds."""
        if store is not self._store:
            self.close()
            self._store, self._looked, self._next, self.silence = store, now, now, 0.0
        passed, self._looked = min(now - self._looked, self._interval), now
        if self._answered():
            self.silence = 0.0
        elif self._question is not None:
            self.silence += passed
        if (self._question is None or self._question.done()) and now >= self._next:
            self._next = now + self._interval
            self._question = asyncio.ensure_future(store.contains([]))

    def _answered(self) -> bool:
        question = self._question
        return question is not None and question.done() and not question.cancelled() and question.exception() is None

    def close(self) -> None:
        if self._question is not None:
            self._question.cancel()
            self._question = None
