"""What one attempt holds in the node's pool, with one owner that lets go of all of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from shared.engines.base import Fetched, Held, KVStore
from shared.errors import DeadlineExceeded, StoreError
from shared.telemetry import held_gauge

T = TypeVar("T")

_late: set[asyncio.Future[None]] = set()
"""Calls whose callers have gone; referenced here until they have answered."""


def slots_of(answer: Any) -> list[Held]:
    """The holds inside any answer of the store."""
    if isinstance(answer, Held):
        return [answer] if answer.slot >= 0 else []
    if isinstance(answer, Fetched):
        return slots_of(answer.held)
    if isinstance(answer, list | tuple):
        return [held for item in answer for held in slots_of(item)]
    return []


class Holds:
    """Async context manager: at its end every slot that came through :meth:`take` is released.

    A store call outlives the cancellation of its caller (the agent may have granted already); what it still brings is
    released when it comes.
    """

    def __init__(self, store: KVStore, role: str) -> None:
        self.store = store
        self._held: dict[int, Held] = {}
        self._gauge = held_gauge(f"{role}_slots")

    def __len__(self) -> int:
        return len(self._held)

    async def take(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the store and own the slots it grants."""
        task = asyncio.ensure_future(call)
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            late = asyncio.ensure_future(self._release_late(task))
            _late.add(late)
            late.add_done_callback(_late.discard)
            raise
        self.add(slots_of(answer))
        return answer

    def add(self, held: Iterable[Held]) -> None:
        for one in held:
            if one.hold not in self._held:
                self._held[one.hold] = one
                self._gauge.inc()

    async def release(self, held: Sequence[Held]) -> None:
        """Let go of some of them now."""
        ours = [self._held.pop(one.hold) for one in held if one.hold in self._held]
        self._gauge.dec(len(ours))
        if ours:
            # a dead agent holds nothing; one that is stopped reads this when it goes on
            with contextlib.suppress(StoreError, DeadlineExceeded):
                await self.store.release(ours)

    async def close(self) -> None:
        await self.release(list(self._held.values()))

    async def _release_late(self, task: asyncio.Task[Any]) -> None:
        with contextlib.suppress(Exception):
            answer = await task
            self.add(slots_of(answer))
            await self.release(slots_of(answer))

    async def __aenter__(self) -> Holds:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Runs to its end even when the owner is cancelled again."""
        closing = asyncio.ensure_future(self.close())
        while not closing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([closing])
