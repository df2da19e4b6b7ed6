"""Calls to other agents: typed on both ends, over the transfer engine's authenticated connections."""

from __future__ import annotations

from typing import Any

from services.store import peer_messages as wire
from services.store.transfer.base import TransferEngine
from shared.messages import Ref


class PeerCalls:
    """The asking side. ``engine`` is set once it exists: it needs the answering side first."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    async def ask(self, target: Ref, call: wire.AnyCall, kind: Any, timeout: float) -> Any:
        """The answer, of type ``kind``. Raises what the other side raised, PeerGone, DeadlineExceeded."""
        return wire.decode_answer(await self._engine.call(target, wire.encode(call), timeout), kind)
