"""The other conductors of the mesh: asked over the bus for the traces of requests that they served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.conductor.gateway.traces import Found
from shared.bus import Bus
from shared.errors import MooncakeError, Unavailable
from shared.messages import AnyMessage, FindTrace, FoundTrace, Ref
from shared.records import ConductorRecord
from shared.tasks import end

TIMEOUT = 2.0

Here = Callable[[str, str], Found | None]
"""What is known of (request, tenant) here."""


class Fellows:
    """``me`` is this conductor. ``conductors``: those that are registered, itself perhaps among them."""

    def __init__(self, bus: Bus, me: Ref, conductors: Callable[[], Awaitable[list[ConductorRecord]]]) -> None:
        self._bus = bus
        self._me = me
        self._conductors = conductors

    async def serve(self, here: Here) -> None:
        """Answer the others from now on."""

        async def answer(message: AnyMessage) -> AnyMessage | None:
            if not isinstance(message, FindTrace):
                return None
            found = here(message.request, message.tenant) or Found("", "", [])
            return FoundTrace(
                sender=self._me, target=message.sender, trace=found.trace, root=found.root, spans=found.spans
            )

        await self._bus.serve(address(self._me), answer)

    async def find(self, request: str, tenant: str) -> tuple[Found | None, dict[str, str]]:
        """The first that knows ends it. See :class:`services.conductor.gateway.traces.Others`."""
        try:
            async with asyncio.timeout(TIMEOUT):
                others = [one.ref for one in await self._conductors() if one.ref.id != self._me.id]
        except (Unavailable, TimeoutError) as e:
            return None, {"metadata": str(e) or "no answer in time"}
        missing: dict[str, str] = {}
        asked = [asyncio.create_task(self._ask(one, request, tenant, missing)) for one in others]
        try:
            for answer in asyncio.as_completed(asked):
                if (found := await answer) is not None:
                    return found, {}
            return None, missing
        finally:
            await end(*asked)

    async def _ask(self, whom: Ref, request: str, tenant: str, missing: dict[str, str]) -> Found | None:
        question = FindTrace(sender=self._me, target=whom, request=request, tenant=tenant)
        try:
            answer = await self._bus.request(address(whom), question, TIMEOUT)
        except MooncakeError as e:
            missing[f"conductor {whom.id}"] = e.message
            return None
        known = isinstance(answer, FoundTrace) and answer.trace
        return Found(answer.trace, answer.root, answer.spans) if isinstance(answer, FoundTrace) and known else None


def address(conductor: Ref) -> str:
    """Where questions about traces go: beside what the dispatcher receives."""
    return f"traces-{conductor.id}"
