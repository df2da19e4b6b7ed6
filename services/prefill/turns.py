"""The async side of the prefill queue: wait until it is time to ask for a landing, and for the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.prefill.queue import PrefillQueue
from shared.instance.attempts import Key


class Turns:
    """Wakes requests as the queue moves, and only those that it concerns: hundreds may wait. Every wait ends with its
    attempt (cancellation)."""

    def __init__(self, queue: PrefillQueue) -> None:
        self.queue = queue
        self._waiting: dict[Key, asyncio.Future[None]] = {}

    def leave(self, key: Key) -> None:
        """Out of the queue; whoever is next may go on. Idempotent."""
        self.queue.leave(key)
        self._move()

    async def near(self, key: Key) -> None:
        """Ready from now on; returns when it computes soon."""
        self.queue.ready(key)
        await self._until(key, lambda: self.queue.near(key))
        self.queue.commit(key)

    async def turn(self, key: Key) -> None:
        """Returns when the compute thread is this request's, until it leaves the queue."""
        await self._until(key, lambda: self.queue.current == key)

    async def _until(self, key: Key, reached: Callable[[], bool]) -> None:
        self._move()
        while not reached():
            self._waiting[key] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[key]
            finally:
                del self._waiting[key]

    def _move(self) -> None:
        self.queue.advance()
        for key in self.queue.front():
            future = self._waiting.get(key)
            if future is not None and not future.done():
                future.set_result(None)
