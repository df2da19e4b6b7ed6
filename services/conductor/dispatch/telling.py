"""Asking one instance about one attempt, until it answers, dies, or the attempt is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.conductor.dispatch.attempts import Side
from services.conductor.dispatch.events import Arrived, Event, NotHeld, Refusal, Took
from shared.bus import Bus
from shared.errors import BusDown, DeadlineExceeded, MooncakeError, NoResponders, ProtocolError
from shared.messages import Accepted, Admit, AnyMessage, Ref, RefusedReply, Since, SinceReply, Submit

PAUSE = 0.2
NOT_HELD = frozenset({"unknown_attempt", "stale_incarnation", "tombstoned"})


class Teller:
    """``no_responders``: told of an instance that nobody serves; whether it is dead is the roster's to say.
    ``patience``: seconds of unanswered asking that count as a refusal."""

    def __init__(self, bus: Bus, timeout: float, patience: float, no_responders: Callable[[Ref], None]) -> None:
        self._bus = bus
        self._timeout = timeout
        self._patience = patience
        self._no_responders = no_responders

    async def ask(self, side: Side, ref: Ref, make: Callable[[], Submit | Admit]) -> Event:
        """Repeats the question, same attempt, until it is answered (rule: ask_again). Silence while the bus is down
        does not count."""
        waited = 0.0
        while waited < self._patience:
            message = make()
            try:
                reply = await self._bus.request(ref.id, message, self._timeout)
                return answer(side, message, reply)
            except DeadlineExceeded:
                waited += self._timeout
            except NoResponders:
                self._no_responders(ref)
                waited += PAUSE
                await asyncio.sleep(PAUSE)
            except BusDown:
                await asyncio.sleep(PAUSE)
            except MooncakeError as e:
                return Refusal(message.attempt, side, e)
        return Refusal(make().attempt, side, DeadlineExceeded(f"no answer of {side} within {self._patience:g} s"))

    async def since(self, ref: Ref, message: Since) -> list[Event]:
        """Once; whoever wants to know asks again."""
        try:
            reply = await self._bus.request(ref.id, message, self._timeout)
        except NoResponders:
            self._no_responders(ref)
            return []
        except MooncakeError:
            return []
        if isinstance(reply, RefusedReply):
            return [NotHeld(message.attempt, ref)] if reply.error.code in NOT_HELD else []
        if not isinstance(reply, SinceReply) or reply.attempt != message.attempt:
            return []  # rule: since_attempt
        now = asyncio.get_running_loop().time()
        return [
            Arrived(message.attempt, ref, output, reply.usage if output.index == 0 else None, now)
            for output in reply.outputs
        ]

    async def send(self, ref: Ref, message: AnyMessage) -> None:
        """Fire and forget: the live list says the same, later."""
        try:
            await self._bus.send(ref.id, message)
        except MooncakeError:
            return


def answer(side: Side, message: Submit | Admit, reply: AnyMessage) -> Event:
    if isinstance(reply, Accepted):
        return Took(message.attempt, side, reply.load)
    if isinstance(reply, RefusedReply):
        return Refusal(message.attempt, side, MooncakeError.from_wire(reply.error))
    return Refusal(message.attempt, side, ProtocolError(f"{type(reply).__name__} is no answer to {side}"))
