"""What the processes of a mesh know of each other, in Redis: registrations that expire, reservations, leases.

A process publishes itself with shared/heartbeat.py. Everything here raises Unavailable, quickly, while Redis is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable
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
    """``blocks`` and ``work_ms`` of prefill promised to ``attempt`` (unique to its owner) at ``instance`` by ``owner``
    (ids without '/')."""

    attempt: str
    instance: str
    blocks: int
    work_ms: int = 0
    owner: str = ""

    @property
    def field(self) -> str:
        return f"{self.instance}/{self.owner}/{self.attempt}"


@dataclass(frozen=True)
class Reserved:
    blocks: int
    attempts: int
    work_ms: int = 0


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

    async def exchange(
        self, made: Iterable[Reservation], released: Iterable[Reservation], ttl: float = RESERVATION_TTL
    ) -> None:
        """Make or renew reservations and release others, in one call."""
        gone = [entry.field for entry in released]
        args: list[Argument] = [max(1, int(ttl * 1000)), len(gone), *gone]
        for entry in made:
            args += [entry.field, f"{entry.blocks} {entry.work_ms}"]
        if len(args) > 2:
            await self._link.run(load("reserve"), self._keys.reserved, args)

    async def sums(self, besides: Collection[str] = ()) -> dict[str, Reserved]:
        """Instance -> what is reserved there now, by all conductors ``besides`` these."""
        flat = await self._link.run(load("reserved"), self._keys.reserved, list(besides))
        rows = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
        return {instance.decode(): Reserved(blocks, attempts, work) for instance, blocks, attempts, work in rows}

    # -- roles that one process at a time plays ---------------------------------------------------------------

    async def hold_lease(self, name: str, owner: str, ttl: float) -> bool:
        """Take or renew the lease ``name``; False while somebody else has it."""
        return await self.lease_holder(name, owner, ttl) == owner

    async def lease_holder(self, name: str, owner: str, ttl: float) -> str:
        """Take or renew the lease ``name``, unless somebody else has it; who has it then."""
        holder: bytes = await self._link.run(load("hold_lease"), [self._keys.lease(name)], [owner, int(ttl * 1000)])
        return holder.decode()


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
