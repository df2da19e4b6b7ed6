"""Removing blocks everywhere: here, and at every agent that the index names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.store import peer_messages as peer
from services.store.directory import Directory
from services.store.peers import PeerCalls
from services.store.slab import Slab
from shared.errors import MooncakeError
from shared.telemetry import log

logger = log("store.removal")


class Removal:
    def __init__(self, calls: PeerCalls, directory: Directory) -> None:
        self._calls = calls
        self._directory = directory

    async def remove(self, slab: Slab, keys: Sequence[bytes], timeout: float) -> list[bool]:
        """Was it there, here or elsewhere? Readers that hold or lease a block keep it to the end. An agent that cannot
        be asked keeps its copy, and is logged."""
        removed = {key: slab.remove(key) for key in dict.fromkeys(keys)}
        located = await self._directory.locate(list(removed))
        at: dict[str, list[bytes]] = {}
        for key, agents in zip(removed, located, strict=True):
            for agent in agents:
                at.setdefault(agent, []).append(key)
        answers = await asyncio.gather(*(self._ask(slab, agent, theirs, timeout) for agent, theirs in at.items()))
        for theirs, answer in zip(at.values(), answers, strict=True):
            for key, there in zip(theirs, answer, strict=True):
                removed[key] |= there
        return [removed[key] for key in keys]

    async def _ask(self, slab: Slab, agent: str, keys: list[bytes], timeout: float) -> list[bool]:
        try:
            owner = await self._directory.peer(agent)
            call = peer.Remove(slab.name, b"".join(keys))
            answer: list[bool] = await self._calls.ask(owner.ref, call, list[bool], timeout)
            return answer
        except MooncakeError as e:
            logger.warning("blocks not removed at a peer", agent=agent, blocks=len(keys), error=e.message)
            return [False] * len(keys)
