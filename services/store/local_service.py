"""The agent's answers to its engines, and what becomes of an engine's holds when it goes."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Sequence
from typing import Any

from services.store import local_messages as wire
from services.store import metrics
from services.store.ask import Ask
from services.store.connection import Connection, Handler
from services.store.directory import Directory
from services.store.fetcher import Fetcher
from services.store.landing_control import LandingControl
from services.store.local_messages import HeldTuple, pack_held
from services.store.object_service import PROMOTION, ObjectService, bounded, keys_of
from services.store.preemption import Victim
from services.store.reader import Wanted
from services.store.slab import Slab
from services.store.streamer import Streamer
from services.store.trace_context import carried_by, traced
from shared.blocks import KEY
from shared.engines.base import Fetched, Held, Kind, LandingTarget, Owner, PoolClass
from shared.errors import DeadlineExceeded, InvalidInput
from shared.telemetry import log

logger = log("store.local")

LANDING_PROMOTION = 0.5
"""Seconds that a landing waits for blocks of the SSD. What is not there by then the writer sends."""


class LocalService:
    """One for an agent. Holds of a connection end by release, by its Bye, or once EOF *and* the death of the process
    are seen (``conn_holds``): a stopped process keeps its slots."""

    def __init__(
        self,
        fetcher: Fetcher,
        landings: LandingControl,
        streamer: Streamer,
        directory: Directory,
        objects: ObjectService,
        stats: Callable[[], dict[str, float]],
    ) -> None:
        self._fetcher = fetcher
        self._landings = landings
        self._streamer = streamer
        self._directory = directory
        self._stats = stats
        self.connections: set[Connection] = set()
        self.orphans: set[Connection] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = False
        self._handlers: dict[type, Handler] = {
            wire.LeaseLocal: self._lease,
            wire.Contains: lambda c, r: c.slab.contains(keys_of(r.keys)),
            wire.Reserve: self._reserve,
            wire.Allocate: self._allocate,
            wire.Wait: self._wait,
            wire.Commit: self._commit,
            wire.Release: lambda c, r: c.slab.release(c.id, r.holds),
            wire.Fetch: self._fetch,
            wire.OpenLanding: self._open_landing,
            wire.Missing: lambda c, r: self._landings.missing(c.slab, c.id, r.token, bounded(r.timeout)),
            wire.Owe: lambda c, r: self._landings.owe(c.slab, c.id, r.token, r.blocks),
            wire.CloseLanding: self._close_landing,
            wire.Stream: self._stream,
            **objects.handlers,
            wire.GiveUp: lambda c, r: c.give_up(r.request),
            wire.Stats: lambda c, r: self._stats(),
            wire.Bye: self._bye,
        }

    def uses(self, slab: Slab) -> bool:
        """Somebody is attached to it, or hung up but lives."""
        return any(connection.slab is slab for connection in (*self.connections, *self.orphans))

    def handle(self, connection: Connection, request: wire.AnyRequest) -> Any:
        return self._handlers[type(request)](connection, request)

    # -- blocks ----------------------------------------------------------------------------------------

    def _lease(self, c: Connection, r: wire.LeaseLocal) -> Any:
        below = any(map(c.slab.is_below, keys_of(r.keys)))
        return self._lease_below(c, r) if below else self._lease_here(c, r)

    async def _lease_below(self, c: Connection, r: wire.LeaseLocal) -> list[HeldTuple | None]:
        keys, by = keys_of(r.keys), r.by.checked()
        async with self._fetcher.brought_up(c.slab, keys, *by, PROMOTION, disk_only=False):
            return self._lease_here(c, r)

    def _lease_here(self, c: Connection, r: wire.LeaseLocal) -> list[HeldTuple | None]:
        held = c.slab.pool.lease(keys_of(r.keys), c.id, *r.by.checked())
        metrics.LOOKUPS.labels("hit").inc(sum(h is not None for h in held))
        metrics.LOOKUPS.labels("miss").inc(held.count(None))
        return [None if h is None else pack_held(h) for h in held]

    def _reserve(self, c: Connection, r: wire.Reserve) -> Any:
        keys, (owner, pool_class), timeout = keys_of(r.keys), r.by.checked(), bounded(r.timeout)
        held = c.slab.reserve_now(keys, c.id, owner, pool_class)
        return self._reserve_later(c, keys, owner, pool_class, timeout) if held is None else pack_all(held)

    async def _reserve_later(
        self, c: Connection, keys: Sequence[bytes], owner: Owner, pool_class: PoolClass, timeout: float
    ) -> list[HeldTuple]:
        return pack_all(await c.slab.reserve(keys, c.id, owner, pool_class, timeout))

    async def _allocate(self, c: Connection, r: wire.Allocate) -> list[HeldTuple]:
        if r.count < 0:
            raise InvalidInput("a negative count", field="count")
        return pack_all(await c.slab.allocate(r.count, c.id, *r.by.checked(), bounded(r.timeout)))

    async def _wait(self, c: Connection, r: wire.Wait) -> HeldTuple | None:
        if len(r.key) != KEY:
            raise InvalidInput(f"a key has {KEY} bytes", field="key")
        if not await c.slab.settled(r.key, bounded(r.timeout)):
            raise DeadlineExceeded(f"the block is still being written after {r.timeout:g} s")
        held = c.slab.pool.lease([r.key], c.id, *r.by.checked())[0]
        return None if held is None else pack_held(held)

    def _commit(self, c: Connection, r: wire.Commit) -> Any:
        keys = keys_of(r.keys)
        size = c.slab.geometry.slot_bytes
        lengths = r.lengths or [size] * len(keys)
        if not len(keys) == len(r.holds) == len(lengths) or len(r.parent) not in (0, KEY):
            raise InvalidInput("as many holds as keys and lengths, and a parent of 16 bytes or none", field="keys")
        if not all(0 < length <= size for length in lengths):
            raise InvalidInput(f"a block has 1 to {size} bytes", field="lengths")
        held = c.slab.commit(c.id, r.holds, r.parent, keys, lengths, chained=r.chained)
        metrics.COMMITTED.inc(sum(h.kind is Kind.PRESENT for h in held))
        if r.release:
            c.slab.release(c.id, r.holds)
        return self._indexed(held, bounded(r.timeout)) if r.indexed else pack_all(held)

    async def _indexed(self, held: Sequence[Held], timeout: float) -> list[HeldTuple]:
        await self._directory.flushed(timeout)
        return pack_all(held)

    def _fetch(self, c: Connection, r: wire.Fetch) -> Any:
        keys = keys_of(r.keys)
        parents = [r.parent, *keys][: len(keys)] if r.chained else [r.parent] * len(keys)
        wanted = [Wanted(key, parent) for key, parent in zip(keys, parents, strict=True)]
        ask = Ask(c.slab, c.id, *r.by.checked(), carried_by(r.trace))
        here, timeout = self._fetcher.here(ask, wanted), bounded(r.timeout)
        return self._bring(ask, wanted, r.sources, timeout) if here is None else [pack_fetched(f) for f in here]

    async def _bring(
        self, ask: Ask, wanted: Sequence[Wanted], sources: Sequence[str], timeout: float
    ) -> list[wire.FetchedTuple]:
        return [pack_fetched(f) for f in await self._fetcher.fetch(ask, wanted, sources, timeout)]

    # -- landings --------------------------------------------------------------------------------------

    async def _open_landing(self, c: Connection, r: wire.OpenLanding) -> wire.Opened:
        """What this node's SSD has is brought up first, held softly: it makes way where the landing needs the room."""
        keys, owner = keys_of(r.keys), r.by.checked()[0]
        with traced("store.landing", carried_by(r.trace), blocks=r.blocks, writer=r.writer.id) as span:
            async with self._fetcher.brought_up(c.slab, keys, owner, PoolClass.PREFETCH, LANDING_PROMOTION):
                landing, held = await self._landings.open(
                    c.slab, c.id, keys, r.blocks, r.tokens, r.writer, owner, bounded(r.timeout), frozenset(r.apart)
                )
            span.set_attribute("mooncake.have", len(landing.have))
        return wire.Opened(landing.token, pack_all(held), sorted(landing.have))

    def _close_landing(self, c: Connection, r: wire.CloseLanding) -> list[HeldTuple]:
        if r.keep:
            return pack_all(self._landings.keep(c.slab, c.id, r.token))
        self._landings.fence(c.slab, c.id, r.token)
        return []

    async def _stream(self, c: Connection, r: wire.Stream) -> int:
        target = LandingTarget(r.agent, r.token, r.slots, r.segment)
        with traced("store.stream", carried_by(r.trace)) as span:
            moved = await self._streamer.stream(c.slab, target, r.runs, bounded(r.timeout))
            span.set_attribute("mooncake.bytes", moved)
            return moved

    def abort(self, slab: Slab, victim: Victim) -> None:
        """A request has to give way. Its landings end here and now; what its engine writes into is the engine's to
        release. One that hung up, or is stopped, keeps that (``conn_holds``)."""
        self._landings.fence_owner(slab, victim.connection, victim.owner.id)
        for connection in self.connections:
            if connection.id == victim.connection:
                connection.aborted(victim.owner.id)

    # -- the end of a connection -----------------------------------------------------------------------

    async def _bye(self, c: Connection, r: wire.Bye) -> None:
        c.said_bye = True
        await self._let_go(c)

    def lost(self, connection: Connection) -> None:
        """EOF. Waiting requests end; holds end once the process is dead."""
        for task in tuple(connection.tasks.values()):
            task.cancel()
        self.connections.discard(connection)
        if self._closing or connection.said_bye or dead(connection.pidfd):
            self._end(connection)
            return
        self.orphans.add(connection)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection.pidfd, self._died, connection)
        logger.info("engine hung up but lives: its slots stay held", name=connection.name, pid=connection.pid)

    def _died(self, connection: Connection) -> None:
        asyncio.get_running_loop().remove_reader(connection.pidfd)
        self.orphans.discard(connection)
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        """All that it held is over (``death_fences``). Idempotent."""
        task = asyncio.create_task(self._let_go(connection))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _let_go(self, connection: Connection) -> None:
        waiting = set(connection.tasks.values()) - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)  # nothing is granted to it any more
        self._landings.fence_all(connection.slab, connection.id)
        connection.slab.pool.drop(connection.id)
        connection.slab.drain()
        connection.slab.changed()
        if connection.pidfd >= 0 and connection not in self.connections:
            os.close(connection.pidfd)
            connection.pidfd = -1
            connection.mailbox.close()

    async def close(self) -> None:
        self._closing = True
        for connection in tuple(self.connections):
            connection.close()
        await asyncio.sleep(0)  # they are told that they are lost in the loop's next round
        loop = asyncio.get_running_loop()
        for connection in tuple(self.orphans):
            loop.remove_reader(connection.pidfd)
            os.close(connection.pidfd)
        self.orphans.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)


def dead(pidfd: int) -> bool:
    """The process behind a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def pack_all(held: Sequence[Held]) -> list[HeldTuple]:
    return [pack_held(h) for h in held]


def pack_fetched(fetched: Fetched) -> wire.FetchedTuple:
    held = None if fetched.held is None else pack_held(fetched.held)
    return wire.FetchedTuple(held, fetched.transport, fetched.bytes, fetched.error, fetched.length)
