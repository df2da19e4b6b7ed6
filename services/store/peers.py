"""Calls to other agents: typed on both ends, over the transfer engine's authenticated connections."""

from __future__ import annotations

import asyncio
from typing import Any

from services.store import peer_messages as wire
from services.store.transfer.base import TransferEngine
from shared.errors import MooncakeError
from shared.messages import Ref
from shared.telemetry import log

logger = log("store.peers")

CALL_TIMEOUT = 2.0
"""Seconds for a lease, a renewal and their like: small messages to an agent that is alive."""


class PeerCalls:
    """The asking side."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._told: set[asyncio.Task[None]] = set()

    async def ask(self, target: Ref, call: wire.AnyCall, kind: Any, timeout: float) -> Any:
        """The answer, of type ``kind``. Raises what the other side raised, PeerGone, DeadlineExceeded."""
        return wire.decode_answer(await self._engine.call(target, wire.encode(call), timeout), kind)

    def tell(self, target: Ref, call: wire.AnyCall) -> None:
        """Ask without waiting for the answer, or for the call to arrive at all."""

        async def tell() -> None:
            try:
                await self.ask(target, call, None, CALL_TIMEOUT)
            except MooncakeError as e:
                logger.debug("peer not told", peer=target.id, error=e.message)

        task = asyncio.create_task(tell())
        self._told.add(task)
        task.add_done_callback(self._told.discard)
