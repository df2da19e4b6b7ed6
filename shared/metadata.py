"""What the processes of a mesh know of each other, in Redis: registrations that expire, reservations, leases.

A process publishes itself with shared/heartbeat.py. Everything here raises Unavailable, quickly, while Redis is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import msgspec

from shared.errors import MALFORMED, ProtocolError, Unavailable
from shared.records import AgentRecord, ConductorRecord, InstanceRecord
from shared.redis_client import Argument, RedisLink
from shared.redis_scripts import load
from shared.registration import TTL, Keys, Record, Registration, unpack
from shared.telemetry import log

R = TypeVar("R", InstanceRecord, AgentRecord, ConductorRecord)

RESERVATION_TTL = 5.0


@dataclass(frozen=True)
class Snapshot:
    """The living as Redis knew them ``stale`` seconds ago. ``age``: id -> seconds since its last heartbeat then.

    ``fresh`` False: Redis could not be asked now, and this repeats the last answer.
    """

    instances: list[InstanceRecord] = field(default_factory=list)
    agents: list[AgentRecord] = field(default_factory=list)
    conductors: list[ConductorRecord] = field(default_factory=list)
    age: dict[str, float] = field(default_factory=dict)
    taken: float = 0.0  # time.monotonic of the answer, as asyncio's loop clock has it
    stale: float = 0.0
    fresh: bool = True


@dataclass(frozen=True)
class Reservation:
    """``blocks`` promised to ``attempt`` (unique, "request.attempt" say) at ``instance`` (an id without '/')."""

    attempt: str
    instance: str
    blocks: int


@dataclass(frozen=True)
class Reserved:
    blocks: int
    attempts: int


class Metadata:
    """Asynchronous view of one mesh's metadata. Owned by one process and loop; close() ends it."""

    def __init__(self, url: str, mesh: str) -> None:
        self._link = RedisLink(url)
        self._keys = Keys(mesh)
        self._mesh = mesh

    @classmethod
    async def connect(cls, url: str, mesh: str, *, timeout: float = 10.0) -> Self:
        """Connect and wait until Redis answers, at most ``timeout`` seconds (then Unavailable); 0 does not wait."""
        metadata = cls(url, mesh)
        try:
            await metadata._wait(timeout)
        except BaseException:
            await metadata.close()
            raise
        return metadata

    async def _wait(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while timeout > 0:
            try:
                await self.sums()
                return
            except Unavailable:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(0.1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._link.close()

    @property
    def link(self) -> RedisLink:
        """The connection pool, shared with the block index."""
        return self._link

    # -- registrations ----------------------------------------------------------------------------------------

    async def register(self, record: Record, ttl: float = TTL) -> None:
        """Register once, without heartbeats. Raises NamespaceMismatch (``field`` says where), Unavailable."""
        registration = Registration(self._mesh, ttl)
        keys, args = registration.call(record)
        registration.answered(await self._link.run(load("register"), keys, args), record)

    async def deregister(self, record: Record) -> None:
        """Forget ``record`` now, unless a later incarnation has taken its id."""
        await self._link.run(load("deregister"), *Registration(self._mesh).removal(record))

    async def instances(self) -> list[InstanceRecord]:
        return (await self._living(InstanceRecord))[0]

    async def agents(self) -> list[AgentRecord]:
        return (await self._living(AgentRecord))[0]

    async def conductors(self) -> list[ConductorRecord]:
        return (await self._living(ConductorRecord))[0]

    async def _living(self, kind: type[R]) -> tuple[list[R], dict[str, float]]:
        now, found = await self._link.run(load("list"), self._keys.of(kind), [])
        return _decoded(kind, found, float(now))

    async def snapshot(self) -> Snapshot:
        """All kinds in one call."""
        kinds = (InstanceRecord, AgentRecord, ConductorRecord)
        keys = [key for kind in kinds for key in self._keys.of(kind)]
        now, *found = await self._link.run(load("list"), keys, [])
        instances, ages = _decoded(InstanceRecord, found[0], float(now))
        agents, agent_ages = _decoded(AgentRecord, found[1], float(now))
        conductors, conductor_ages = _decoded(ConductorRecord, found[2], float(now))
        age = ages | agent_ages | conductor_ages
        return Snapshot(instances, agents, conductors, age, asyncio.get_running_loop().time())

    async def watch(self, interval: float = 0.5) -> AsyncIterator[Snapshot]:
        """A snapshot every ``interval`` seconds, for ever. While Redis is gone the last one comes again, not fresh,
        with ``stale`` growing (an empty one when there was none): whom to trust for how long is the reader's choice."""
        loop = asyncio.get_running_loop()
        last, started = Snapshot(fresh=False), loop.time()
        while True:
            before = loop.time()
            try:
                last = await self.snapshot()
                yield last
            except Exception as e:
                if not isinstance(e, Unavailable):
                    log("metadata").exception("the answer of Redis was not understood")
                yield replace(last, fresh=False, stale=loop.time() - (last.taken or started))
            await asyncio.sleep(max(0.0, interval - (loop.time() - before)))

    # -- reservations -----------------------------------------------------------------------------------------

    async def reserve(self, attempt: str, instance: str, blocks: int, ttl: float = RESERVATION_TTL) -> None:
        """Tell the other conductors that ``attempt`` will need ``blocks`` at ``instance``. Again renews."""
        await self.reserve_all([Reservation(attempt, instance, blocks)], ttl)

    async def reserve_all(self, reservations: Iterable[Reservation], ttl: float = RESERVATION_TTL) -> None:
        await self._reserve(reservations, max(1, int(ttl * 1000)))

    async def release(self, attempt: str, instance: str) -> None:
        await self.release_all([Reservation(attempt, instance, 0)])

    async def release_all(self, reservations: Iterable[Reservation]) -> None:
        await self._reserve(reservations, 0)

    async def _reserve(self, reservations: Iterable[Reservation], ttl: int) -> None:
        args: list[Argument] = [ttl]
        for entry in reservations:
            args += [f"{entry.instance}/{entry.attempt}", entry.blocks]
        if len(args) > 1:
            await self._link.run(load("reserve"), self._keys.reserved, args)

    async def sums(self) -> dict[str, Reserved]:
        """Instance -> what is reserved there now, by all conductors."""
        flat = await self._link.run(load("reserved"), self._keys.reserved, [])
        triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return {instance.decode(): Reserved(blocks, attempts) for instance, blocks, attempts in triples}

    # -- roles that one process at a time plays ---------------------------------------------------------------

    async def hold_lease(self, name: str, owner: str, ttl: float) -> bool:
        """Take or renew the lease ``name``; False while somebody else has it."""
        key = self._keys.lease(name)
        return bool(await self._link.run(load("hold_lease"), [key], [owner, int(ttl * 1000)]))


def _decoded(kind: type[R], found: list[bytes], now: float) -> tuple[list[R], dict[str, float]]:
    """Records and ages; a record that this version cannot read is left out."""
    records: list[R] = []
    ages: dict[str, float] = {}
    for value, until in zip(found[::2], found[1::2], strict=True):
        with contextlib.suppress(*MALFORMED, ProtocolError):
            packed, age = unpack(value, until, now)
            record = msgspec.msgpack.decode(packed, type=kind)
            records.append(record)
            ages[record.ref.id] = age
    return records, ages
