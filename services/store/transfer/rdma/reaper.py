"""Has the peer destroy its ends of connections that are no more (``all_completions``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from services.store.transfer.rdma.messages import Call, Reap
from shared.errors import MooncakeError, PeerRefused, StaleIncarnation

TRIES = 3
BACK_OFF = 0.05


class Caller(Protocol):
    async def __call__(self, call: Call, kind: Any) -> Any: ...


class Reaper:
    """``unreaped``: lanes whose WRITEs wait for it. ``reaped`` is told what is destroyed, ``give_up`` why not."""

    def __init__(
        self,
        call: Caller,
        unreaped: Callable[[], Iterable[int]],
        reaped: Callable[[set[int]], None],
        give_up: Callable[[MooncakeError], None],
    ) -> None:
        self._call = call
        self._unreaped = unreaped
        self._reaped = reaped
        self._give_up = give_up
        self._over: set[int] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, number: int) -> None:
        self._over.add(number)
        self.soon()

    def soon(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        tries = 0
        while numbers := self._over | set(self._unreaped()):
            try:
                await self._call(Reap(sorted(numbers)), None)
            except MooncakeError as e:
                tries += 1
                if tries >= TRIES or isinstance(e, StaleIncarnation | PeerRefused):
                    return self._give_up(e)
                await asyncio.sleep(BACK_OFF * 2**tries)
                continue
            self._over -= numbers
            self._reaped(numbers)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
