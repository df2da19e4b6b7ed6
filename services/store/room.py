"""Room in one slab for whoever waits: served in the line's order, made by aborting where nothing is left to evict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.store.metrics import ABORTED
from services.store.pool import Pool
from services.store.preemption import Preemption, Victim
from services.store.waiting import GROWTH_RANK, Line, Want
from shared.engines.base import Owner, PoolClass
from shared.errors import PoolFull
from shared.telemetry import log

logger = log("store.room")

RETRY = 0.02
"""Seconds until a waiting wish is tried again although nothing was released: a copy that pinned a slot has ended."""

T = TypeVar("T")


class Room:
    """``drain`` is called after a change of the pool; ``changed`` with the seconds after which the line is to be tried.
    ``patience``: seconds that a landing or a prefill waits before it has others aborted; growth does at once. ``abort``
    tells a victim, and ends what of it can be ended here."""

    def __init__(
        self,
        pool: Pool,
        agent: int,
        patience: float,
        drain: Callable[[], None],
        changed: Callable[[float], None],
    ) -> None:
        self.line = Line()
        self.abort: Callable[[Victim], None] = lambda victim: None
        self._pool = pool
        self._patience = patience
        self._drain = drain
        self._changed = changed
        self._preemption = Preemption(pool, agent)
        self._tries: dict[Want, Callable[[], bool]] = {}
        self._since: dict[Want, float] = {}

    def __len__(self) -> int:
        """Wishes that wait."""
        return len(self.line)

    def want(self, slots: int, owner: Owner, pool_class: PoolClass) -> Want:
        return self.line.want(slots, owner, pool_class)

    async def get(self, attempt: Callable[[int], T | None], want: Want, timeout: float) -> T:
        """What ``attempt`` gives, tried at once and again, in the line's order, whenever room may have come free.
        ``attempt`` is told how many slots it must leave. Raises PoolFull, and what ``attempt`` raises."""
        granted = attempt(self.line.kept_from(want))
        self._drain()
        if granted is not None:
            return granted
        return await self._stand_in_line(attempt, want, timeout)

    async def _stand_in_line(self, attempt: Callable[[int], T | None], want: Want, timeout: float) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def again() -> bool:
            if future.done():
                return True
            try:
                granted = attempt(self.line.kept_from(want))
            except Exception as e:
                future.set_exception(e)
                return True
            if granted is not None:
                future.set_result(granted)
            return granted is not None

        self.line.join(want)
        self._tries[want] = again
        self._since[want] = asyncio.get_running_loop().time()
        self._changed(0.0 if want.rank == GROWTH_RANK else RETRY)
        try:
            await asyncio.wait({future}, timeout=timeout)
        except asyncio.CancelledError:
            if not future.done():
                raise  # else it is granted already: the answer must go out, so that it is given back
        finally:
            self.line.leave(want)
            del self._tries[want], self._since[want]
            self._changed(0.0)
        if not future.done():
            raise PoolFull(f"no room for {want.slots} slots within {timeout:.1f} s")
        return future.result()

    def serve(self) -> None:
        """Try all that wait, in order; have others give way for the first that is not met."""
        unmet = [want for want in self.line if want in self._tries and not self._tries[want]()]
        if unmet:
            self._make_room(unmet[0])

    def _make_room(self, want: Want) -> None:
        now = asyncio.get_running_loop().time()
        if want.rank != GROWTH_RANK and now - self._since[want] < self._patience:
            return
        for victim in self._preemption.choose(now, want, self.line.kept_from(want)):
            ABORTED.labels(want.pool_class.name.lower()).inc()
            logger.info("has to give way", owner=victim.owner.id, to=want.owner, slots=want.slots)
            self.abort(victim)
