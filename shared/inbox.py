"""A queue with one reader that waits with a deadline, made for deadlines that move with every item."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """On the running loop. :meth:`put` never waits. One timer serves all waits: a deadline that moved on is noticed
    when the timer fires, instead of making and cancelling a timer for every item."""

    __slots__ = ("_due", "_items", "_loop", "_timer", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def take(self) -> T:
        """The oldest item. Raises IndexError when there is none."""
        return self._items.popleft()

    async def wait(self, due: float = float("inf")) -> bool:
        """Until there is an item (True), or the loop's time is ``due`` (False). For one task at a time."""
        while not self._items:
            if due <= self._loop.time():
                return False
            self._due = due
            self._arm()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def close(self) -> None:
        """Let go of the timer. Items may still be put and taken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """A timer that fires too early is left: it will be set anew then."""
        if self._timer is not None and self._timer.when() <= self._due:
            return
        self.close()
        if self._due < float("inf"):
            self._timer = self._loop.call_at(self._due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() >= self._due:
            self._wake()
        else:
            self._arm()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
