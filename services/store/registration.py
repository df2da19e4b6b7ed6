"""The agent in the mesh's metadata and block index: the real :class:`services.store.directory.Directory`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from services.store.directory import ids_of
from services.store.placement import Place
from services.store.sources import Copy
from services.store.transfer.base import Peer
from shared.errors import MooncakeError, PeerGone, Refused, Unavailable
from shared.heartbeat import Heartbeat
from shared.index import DRAM, code
from shared.index.dropping import may_drop
from shared.index.lookup import lookup
from shared.index.publishing import IndexPublisher
from shared.messages import Ref
from shared.metadata import Metadata, Snapshot
from shared.records import AgentRecord
from shared.tasks import end
from shared.telemetry import log

logger = log("store.registration")

WATCH_INTERVAL = 0.5
LOOKUP_TIMEOUT = 1.0


class Registration:
    """Knows the other agents; publishes what is committed and evicted. ``patience``: seconds for the first beat."""

    def __init__(self, redis: str, mesh: str, me: Ref, patience: float) -> None:
        self._me = me
        self._redis = redis
        self._mesh = mesh
        self._patience = patience
        self._metadata = Metadata(redis, mesh)
        self._publisher = IndexPublisher(redis, mesh, code(me.incarnation))
        self._agents: dict[str, AgentRecord] = {}

    @asynccontextmanager
    async def entered(
        self, record: Callable[[], AgentRecord], on_refused: Callable[[Refused], None]
    ) -> AsyncIterator[None]:
        """Registered, beating and publishing while the block runs. ``record`` is called in the heartbeat's thread.
        Raises Unavailable when Redis does not answer."""
        loop = asyncio.get_running_loop()

        def refused(error: Refused) -> None:
            loop.call_soon_threadsafe(on_refused, error)

        heartbeat = Heartbeat(self._redis, self._mesh, record, patience=self._patience, on_refused=refused)
        async with self._metadata, self._publisher, heartbeat:
            watching = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                await end(watching)

    async def _watch(self) -> None:
        async for snapshot in self._metadata.watch(WATCH_INTERVAL):
            self._saw(snapshot)

    def _saw(self, snapshot: Snapshot) -> None:
        if snapshot.fresh:
            self._agents = {agent.ref.id: agent for agent in snapshot.agents}

    # -- Directory -------------------------------------------------------------------------------------

    def committed(self, parent: bytes, keys: Sequence[bytes], tier: int = DRAM) -> None:
        self._publisher.committed(parent or None, keys, tier)

    def evicted(self, keys: Sequence[bytes]) -> None:
        self._publisher.evicted(keys)

    async def flushed(self, timeout: float) -> None:
        await self._publisher.flushed(timeout)

    async def locate(self, keys: Sequence[bytes]) -> list[list[str]]:
        return ids_of(await self.copies(keys))

    async def copies(self, keys: Sequence[bytes]) -> list[list[Copy]]:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                places = await lookup(self._metadata.link, self._mesh, keys)
        except (MooncakeError, TimeoutError) as e:
            logger.info("index not asked", error=str(e))
            return [[] for _ in keys]
        by_code = {agent.code: agent for agent in self._agents.values() if agent.ref.id != self._me.id}
        found = [[(tier, by_code[c]) for c, tier in place.items() if c in by_code] for place in places]
        return [[Copy(a.ref.id, tier, a.backlog_bytes) for tier, a in agents] for agents in found]

    async def peer(self, id: str) -> Peer:
        """From the last snapshot; an agent that just appeared is asked for."""
        if id not in self._agents:
            try:
                self._saw(await self._metadata.snapshot())
            except Unavailable as e:
                raise PeerGone(f"agent {id} is not known, and the metadata cannot be asked: {e.message}") from e
        agent = self._agents.get(id)
        if agent is None:
            raise PeerGone(f"no agent {id} is registered")
        return Peer(agent.ref, agent.host, agent.port, agent.host_id, agent.shm)

    async def places(self) -> list[Place]:
        """From the last snapshot; from a new one where that does not name this agent yet."""
        if self._me.id not in self._agents:
            self._saw(await self._metadata.snapshot())
        return [_place(agent) for agent in self._agents.values()]

    async def may_drop(self, keys: Sequence[bytes], keep: int) -> list[bool]:
        living = {agent.code for agent in self._agents.values()} | {code(self._me.incarnation)}
        return await may_drop(self._metadata.link, self._mesh, code(self._me.incarnation), keys, keep, living)


def _place(agent: AgentRecord) -> Place:
    return Place(agent.ref.id, agent.node, agent.host_id, agent.used / (agent.slots or 1), agent.backlog_bytes)
