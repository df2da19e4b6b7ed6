"""The async side of the prefill queue: wait until it is time to ask for a landing, and for the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.prefill.queue import PrefillQueue
from shared.instance.attempts import Key


class Turns:
    """Wakes requests as the queue moves. Every wait ends with its attempt (cancellation)."""

    def __init__(self, queue: PrefillQueue) -> None:
        self.queue = queue
        self._changed = asyncio.Condition()
        self._notices: set[asyncio.Task[None]] = set()

    def leave(self, key: Key) -> None:
        """Out of the queue; whoever is next may go on. Idempotent."""
        self.queue.leave(key)
        self._notify()

    async def near(self, key: Key) -> None:
        """Ready from now on; returns when it computes soon."""
        self.queue.ready(key)
        await self._until(lambda: self.queue.near(key))

    async def turn(self, key: Key) -> None:
        """Returns when the compute thread is this request's, until it leaves the queue."""
        await self._until(lambda: self.queue.current == key)

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with self._changed:
            self.queue.advance()
            self._changed.notify_all()
            await self._changed.wait_for(reached)

    def _notify(self) -> None:
        notice = asyncio.get_running_loop().create_task(self._advance())
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def _advance(self) -> None:
        async with self._changed:
            self.queue.advance()
            self._changed.notify_all()
