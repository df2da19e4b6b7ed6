"""Sending: without an answer, with one, or again and again until there is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from shared.bus import Bus
from shared.errors import BusDown, DeadlineExceeded, MooncakeError, NoResponders, ProtocolError, Unavailable
from shared.instance.attempts import Key, LinkClock
from shared.messages import AnyMessage, Output, Ref, TokenBatch, TokenEntry, Usage

RETRY_S = 0.05
GONE_S = 1.0
"""How long nobody may serve an id before its process counts as gone: longer than a reconnection's resubscription."""


class Courier:
    """Speaks for ``ref``. Owns the tasks of what is on its way; ``clock`` stands still while the bus is down."""

    def __init__(self, ref: Ref, bus: Bus, clock: LinkClock) -> None:
        self.ref = ref
        self._bus, self._clock = bus, clock
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task owned here: :meth:`settled` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settled(self, timeout: float) -> None:
        """Wait for what is on its way."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    def publish(self, gateway: Ref, entries: list[tuple[Key, Output, Usage | None]]) -> None:
        """One token message of one step to one gateway. Lost ones are asked for with ``since``."""
        batch = [TokenEntry(key[0], key[1], output, usage) for key, output, usage in entries]
        self.post(gateway, TokenBatch(sender=self.ref, target=gateway, entries=batch))

    def post(self, to: Ref, message: AnyMessage) -> None:
        """Send without waiting and without an answer; what cannot be sent now is not sent."""
        self.spawn(self._post(to, message))

    async def _post(self, to: Ref, message: AnyMessage) -> None:
        with contextlib.suppress(Unavailable):
            await self._bus.send(to.id, message)

    async def ask(self, to: Ref, message: AnyMessage, timeout: float) -> AnyMessage:
        """One question. Raises what the bus raises, and the error inside a refusal."""
        answer = await self._bus.request(to.id, message, timeout)
        error = getattr(answer, "error", None)
        if error is not None:
            raise MooncakeError.from_wire(error)
        if answer.target != self.ref:
            raise ProtocolError("an answer meant for another incarnation")
        return answer

    async def insist(self, to: Ref, message: AnyMessage, patience: float, wait: float = 1.0) -> AnyMessage:
        """Repeat a question until it is answered. ``patience`` counts only time with a bus connection. Raises the
        refusal, DeadlineExceeded, or NoResponders once nobody has served that id for ``GONE_S``."""
        began = alive = self._look()
        while True:
            try:
                return await self.ask(to, message, wait)
            except BusDown:
                alive = self._look()
            except NoResponders:
                if self._look() - alive > GONE_S:
                    raise
            except DeadlineExceeded:
                alive = self._look()
                if alive - began > patience:
                    raise
                continue
            await asyncio.sleep(RETRY_S)

    def _look(self) -> float:
        return self._clock.look(asyncio.get_running_loop().time())
