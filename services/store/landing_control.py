"""Landings at this agent: opened for an engine, filled by a remote writer, kept or fenced.

A fenced landing is quarantined until its writer said that it is drained, or our ends of all its endpoints are
destroyed, and until our own receivers have let go of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.store import peer_messages as peer
from services.store.landings import LandingState, Span
from services.store.peers import PeerCalls
from services.store.slab import AGENT, Slab
from services.store.transfer.base import TransferEngine
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import Fenced, InvalidInput, MooncakeError
from shared.messages import Ref
from shared.telemetry import log

logger = log("store.landing")

BUSY_POLL = 0.002
ANSWER = 0.8
"""Share of the drain time-out after which the writer answers what it has got to."""


class LandingControl:
    """For all slabs. ``drain_timeout`` seconds for a writer to drain."""

    def __init__(self, me: Ref, engine: TransferEngine, calls: PeerCalls, drain_timeout: float) -> None:
        self._me = me
        self._engine = engine
        self._calls = calls
        self._drain_timeout = drain_timeout
        self._changed: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(
        self,
        slab: Slab,
        connection: int,
        keys: Sequence[bytes],
        blocks: int,
        tokens: int,
        writer: Ref,
        owner: Owner,
        timeout: float,
        apart: frozenset[int],
    ) -> tuple[LandingState, list[Held]]:
        """Whole or not at all (rule: landing_whole). Raises DoesNotFit, PoolFull, InvalidInput."""
        if blocks > slab.memory.slots:
            slab.pool.slots.check_fits(blocks, PoolClass.LANDING)
        size = slab.geometry.block_size
        if not 0 < tokens <= blocks * size or len(keys) > tokens // size or not apart <= frozenset(range(blocks)):
            raise InvalidInput(f"{blocks} blocks do not hold {tokens} tokens with {len(keys)} keys", field="blocks")

        def attempt(keep: int) -> list[Held] | None:
            return whole(slab, connection, keys, blocks, owner, keep)

        want = slab.room.want(blocks - sum(slab.pool.contains(keys)), owner, PoolClass.LANDING)
        held = await slab.room.get(attempt, want, timeout)
        have = frozenset(i for i, h in enumerate(held) if h.kind is Kind.PRESENT)
        slots, holds = [h.slot for h in held], [h.hold for h in held]
        landing = slab.landings.open(
            connection, writer, tokens, slots, holds, have, apart - have, slab.geometry, owner.id
        )
        slab.grants.open(landing.token, writer, [slots[block] for block in landing.owed])
        self._changed[landing.token] = asyncio.Event()
        return landing, held

    def report(self, slab: Slab, token: int, writer: Ref, spans: Sequence[Span]) -> int:
        """The writer has all completions of these spans. Returns how many layer-tokens are missing. Raises Fenced,
        NotPermitted."""
        landing = slab.landings.report(token, writer, spans)
        if landing.complete:
            self._wake(token)
        return landing.missing

    def _wake(self, token: int) -> None:
        event = self._changed.get(token)
        if event is not None:
            event.set()

    async def missing(self, slab: Slab, connection: int, token: int, timeout: float) -> int:
        """0 once all has landed and no receiver of ours is at work; at the timeout, how many layer-tokens are missing,
        at least 1. Raises Fenced when the landing is over."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            landing = self._own(slab, connection, token)
            left = deadline - asyncio.get_running_loop().time()
            if landing.complete and not slab.grants.busy(token):  # rule: join_receivers
                return 0
            if left <= 0:
                return max(1, landing.missing)
            await self._change(token, min(left, BUSY_POLL) if landing.complete else left)

    async def _change(self, token: int, timeout: float) -> None:
        event = self._changed[token]
        event.clear()
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            pass

    def _own(self, slab: Slab, connection: int, token: int) -> LandingState:
        landing = slab.landings.get(token)
        if landing.connection != connection:
            raise Fenced("the landing belongs to another connection")
        return landing

    def owe(self, slab: Slab, connection: int, token: int, blocks: Sequence[int]) -> None:
        slab.grants.widen(token, self._own(slab, connection, token).owe(blocks))

    def keep(self, slab: Slab, connection: int, token: int) -> list[Held]:
        """All has landed: the slots are ordinary holds of the connection now."""
        self._own(slab, connection, token)
        if slab.grants.busy(token):
            raise InvalidInput("bytes of this landing are still being received", field="keep")
        landing = slab.landings.keep(token)
        slab.grants.close(token, _nothing)
        self._forget(token)
        slab.pool.runs(connection, landing.owner)
        return [self._held(slab, landing, block) for block in range(len(landing.slots))]

    def _held(self, slab: Slab, landing: LandingState, block: int) -> Held:
        slot = landing.slots[block]
        kind, key = (Kind.PRESENT, slab.pool.slots[slot].key) if block in landing.have else (Kind.NEW, b"")
        return Held(landing.holds[block], slot, kind, key)

    def _forget(self, token: int) -> None:
        event = self._changed.pop(token, None)
        if event is not None:
            event.set()

    # -- fencing ---------------------------------------------------------------------------------------

    def fence(self, slab: Slab, connection: int, token: int) -> None:
        """Its holds are over for the engine; the slots come back when nobody can write into them. Idempotent."""
        try:
            landing = self._own(slab, connection, token)
        except Fenced:
            return
        slab.landings.quarantine(token)
        slab.pool.hand_over(connection, landing.holds, AGENT)
        self._forget(token)
        idle = asyncio.Event()
        loop = asyncio.get_running_loop()

        def receivers_done() -> None:
            loop.call_soon_threadsafe(idle.set)

        slab.grants.close(token, receivers_done)
        task = asyncio.create_task(self._quarantine(slab, landing, idle), name=f"quarantine {token}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fence_all(self, slab: Slab, connection: int) -> None:
        """The engine is dead (``death_fences``)."""
        for token in slab.landings.of_connection(connection):
            self.fence(slab, connection, token)

    def fence_owner(self, slab: Slab, connection: int, owner: str) -> None:
        """The request has to give way (rule: landing_abortable): no word from its engine is needed."""
        for token in slab.landings.of_connection(connection):
            if slab.landings.get(token).owner == owner:
                self.fence(slab, connection, token)

    async def _quarantine(self, slab: Slab, landing: LandingState, idle: asyncio.Event) -> None:
        if not await self._drained(landing):
            await self._engine.destroy_endpoints(landing.writer)
        await idle.wait()
        slab.landings.end(landing.token)
        slab.release(AGENT, landing.holds)

    async def _drained(self, landing: LandingState) -> bool:
        """Ask the writer; False when it does not say yes in time (``drain_reported``)."""
        if landing.writer == self._me:
            return True  # our own copies are receivers of ours
        fence = peer.Fence(landing.token, ANSWER * self._drain_timeout)
        try:
            return bool(await self._calls.ask(landing.writer, fence, bool, self._drain_timeout))
        except MooncakeError as e:
            logger.info("writer not drained, its endpoints are destroyed", writer=landing.writer.id, error=e.message)
            return False

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def whole(
    slab: Slab, connection: int, keys: Sequence[bytes], blocks: int, owner: Owner, keep: int
) -> list[Held] | None:
    """One hold for each block: present ones are shared, the rest is private. None when there is no room."""
    missing = blocks - sum(slab.pool.contains(keys))
    slab.pool.slots.check_fits(missing, PoolClass.LANDING)
    present = slab.pool.lease(keys, connection, owner, PoolClass.LANDING)
    private = slab.pool.allocate(missing, connection, owner, PoolClass.LANDING, keep)
    if private is None:
        slab.pool.release(connection, [held.hold for held in present if held is not None])
        return None
    fresh = iter(private)
    return [held or next(fresh) for held in (*present, *[None] * (blocks - len(present)))]


def _nothing() -> None:
    return None
