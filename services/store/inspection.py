"""Looking into stores from outside: what the index says, what the owners say, and whether the bytes are right."""

from __future__ import annotations

import asyncio
import mmap
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from services.store import peer_messages as wire
from services.store.checksums import checksum
from services.store.objects import batches
from services.store.peers import PeerCalls
from services.store.transfer.base import Op, Peer, Request, Status
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.tls import Tls
from shared.errors import MooncakeError, PeerGone
from shared.index import SHARDS, Layout
from shared.index.lookup import lookup
from shared.messages import Ref
from shared.metadata import Metadata
from shared.records import AgentRecord, SlabRecord
from shared.redis_scripts import load

CALL_TIMEOUT = 5.0
READ_TIMEOUT = 30.0
SCAN = 1000
BUFFER = 32 << 20
MOST_BATCH = 64
SHARE = 8
"""A batch takes at most one SHARE-th of an owner's slots."""

SETTLE = 1.0
"""Seconds after which a block that was not there must have left the index, too."""

ATTEMPTS = 4
BUFFER_NAME = "inspection"


class Verdict(StrEnum):
    """``unchecked``: read, but the owner computes no checksums. ``moved``: left the owner and the index meanwhile.
    ``lost``: the index names it, its owner does not have it. ``unread``: there, but it could not be read."""

    GOOD = "good"
    UNCHECKED = "unchecked"
    MOVED = "moved"
    LOST = "lost"
    CORRUPT = "corrupt"
    UNREAD = "unread"


@dataclass(frozen=True)
class Finding:
    """About one key at one agent. ``segment``, ``size`` and ``generation`` are known where it was found, ``why`` where
    it could not be read."""

    key: bytes
    verdict: Verdict
    segment: str = ""
    size: int = 0
    generation: int = 0
    why: str = ""


class Inspector:
    """A peer that holds nothing and only reads. Use :func:`inspector`."""

    def __init__(self, metadata: Metadata, mesh: str, engine: Engine, view: memoryview) -> None:
        self._metadata = metadata
        self._layout = Layout(mesh, SHARDS)
        self._mesh = mesh
        self._engine = engine
        self._calls = PeerCalls(engine)
        self._view = view

    async def indexed(self, agent: AgentRecord) -> AsyncIterator[list[tuple[bytes, int]]]:
        """All that the index says of an agent, as (key, tier), page by page. Raises Unavailable."""
        for shard in self._layout.blocks:
            cursor = b"0"
            while True:
                args: list[str | bytes | int | float] = [cursor, SCAN, agent.code]
                cursor, *page = await self._metadata.link.run(load("index_held"), [shard], args)
                if page:
                    yield list(zip(page[::2], page[1::2], strict=True))
                if cursor == b"0":
                    break

    async def verify(
        self, agent: AgentRecord, keys: Sequence[bytes], slabs: Sequence[SlabRecord]
    ) -> AsyncIterator[Finding]:
        """Reads blocks from their owner and checks them. ``keys`` are indexed at ``agent``; ``slabs``: where to look.
        Raises what keeps all of it from being read (PeerGone, Unauthorized, Unavailable)."""
        absent: list[bytes] = []
        for batch in batches(keys, self._batch(slabs)):
            for finding in await self._read(agent, batch, slabs):
                if finding.verdict is Verdict.GOOD or finding.verdict is Verdict.UNCHECKED:
                    yield finding
                else:
                    absent.append(finding.key)
        for finding in await self._again(agent, absent, slabs):
            yield finding

    def _batch(self, slabs: Sequence[SlabRecord]) -> int:
        """What our buffer takes, and few enough for an owner to bring all of them up from its SSD at one time."""
        largest = max((slab.stride for slab in slabs), default=1)
        smallest = min((slab.slots for slab in slabs), default=1)
        return max(1, min(MOST_BATCH, len(self._view) // largest, smallest // SHARE))

    async def _again(self, agent: AgentRecord, keys: Sequence[bytes], slabs: Sequence[SlabRecord]) -> list[Finding]:
        """What was not read at first may be on its way up from the SSD, evicted, or written anew."""
        findings: dict[bytes, Finding] = {}
        for _ in range(ATTEMPTS):
            left = [key for key in keys if findings.get(key, _UNKNOWN).verdict in _TRIED_AGAIN]
            if not left:
                break
            await asyncio.sleep(SETTLE)
            slabs = await self._with_new(agent, slabs)
            places = await lookup(self._metadata.link, self._mesh, left)
            named = [key for key, place in zip(left, places, strict=True) if agent.code in place]
            findings |= {key: Finding(key, Verdict.MOVED) for key in left if key not in set(named)}
            for batch in batches(named, self._batch(slabs)):
                findings |= {f.key: f for f in await self._read(agent, batch, slabs)}
        return list(findings.values())

    async def _with_new(self, agent: AgentRecord, slabs: Sequence[SlabRecord]) -> list[SlabRecord]:
        """A record is as old as its agent's last heartbeat; the index is not."""
        known = {slab.segment for slab in slabs}
        now = [one for one in await self._metadata.agents() if one.ref == agent.ref]
        return [*slabs, *(slab for one in now for slab in one.slabs if slab.segment not in known)]

    async def _read(self, agent: AgentRecord, keys: Sequence[bytes], slabs: Sequence[SlabRecord]) -> list[Finding]:
        findings: dict[bytes, Finding] = {}
        for slab in slabs:
            left = [key for key in keys if key not in findings]
            if left:
                findings |= {f.key: f for f in await self._read_slab(agent.ref, left, slab)}
        return [findings.get(key) or Finding(key, Verdict.LOST) for key in keys]

    async def _read_slab(self, owner: Ref, keys: Sequence[bytes], slab: SlabRecord) -> list[Finding]:
        leased = await self.lease(owner, keys, slab)
        found = [(key, d) for key, d in zip(keys, leased.blocks, strict=True) if d is not None]
        try:
            return await self._check(owner, found, slab) if found else []
        finally:
            await self.release(owner, slab, leased)

    async def lease(self, owner: Ref, keys: Sequence[bytes], slab: SlabRecord) -> wire.Leased:
        """Raises MooncakeError. Give it back with :meth:`release`."""
        call = wire.Lease(slab.segment, b"".join(keys), 0, slab.namespace.layers)
        answer: wire.Leased = await self._calls.ask(owner, call, wire.Leased, CALL_TIMEOUT)
        return answer

    async def release(self, owner: Ref, slab: SlabRecord, leased: wire.Leased) -> None:
        """Nothing happens where the owner is gone: its leases end by time."""
        if leased.id:
            try:
                await self._calls.ask(owner, wire.Release(slab.segment, [leased.id]), None, CALL_TIMEOUT)
            except MooncakeError:
                return

    async def denounce(self, owner: Ref, finding: Finding) -> None:
        """Tell the owner of a corrupt block, which looks itself and then drops it. Raises MooncakeError."""
        await self._calls.ask(owner, wire.Corrupt(finding.segment, finding.key, finding.generation), None, CALL_TIMEOUT)

    async def _check(
        self, owner: Ref, found: Sequence[tuple[bytes, wire.Descriptor]], slab: SlabRecord
    ) -> list[Finding]:
        requests = [
            Request(Op.READ, BUFFER_NAME, i * slab.stride, owner, slab.segment, d.offset, d.length, d.generation)
            for i, (_, d) in enumerate(found)
        ]
        results = await self._engine.transfer(requests, READ_TIMEOUT)
        findings: list[Finding] = []
        for i, ((key, d), result) in enumerate(zip(found, results, strict=True)):
            if result.status is not Status.COMPLETED or d.length != d.size:
                why = result.error.message if result.error else f"{d.length} of {d.size} bytes are offered"
                findings.append(Finding(key, Verdict.UNREAD, slab.segment, d.size, why=why))
                continue
            verdict = await asyncio.to_thread(self._verdict, i * slab.stride, d)
            findings.append(Finding(key, verdict, slab.segment, d.size, d.generation))
        return findings

    def _verdict(self, at: int, d: wire.Descriptor) -> Verdict:
        if d.checksum is None:
            return Verdict.UNCHECKED
        return Verdict.GOOD if checksum(self._view[at : at + d.size]) == d.checksum else Verdict.CORRUPT


_UNKNOWN = Finding(b"", Verdict.LOST)
_TRIED_AGAIN = (Verdict.LOST, Verdict.UNREAD, Verdict.CORRUPT)


@asynccontextmanager
async def inspector(
    metadata: Metadata,
    mesh: str,
    secret: str,
    transports: str = "prefer:shm,tcp",
    host: str = "127.0.0.1",
    tls: tuple[str, str, str] = ("", "", ""),
) -> AsyncIterator[Inspector]:
    """Reads over ``transports``. ``host``: of our own end, which peers may have to reach. ``tls``: files of
    certificate, key and authorities, where agents talk over TLS. Raises ConfigError."""

    async def resolve(id: str) -> Peer:
        for agent in await metadata.agents():
            if agent.ref.id == id:
                return Peer(agent.ref, agent.host, agent.port, agent.host_id, agent.shm)
        raise PeerGone(f"no agent {id} is registered")

    me = Ref("inspector-" + secrets.token_hex(4), secrets.randbits(63) | 1)
    policy = TransportPolicy.parse(transports)
    secured = Tls.configured(*tls)
    engine = Engine(me, secret=secret.encode(), resolve=resolve, host=host, policy=policy, tls=secured)
    view = memoryview(mmap.mmap(-1, BUFFER))  # unmapped with the last reference to it
    engine.register_local_memory(view, name=BUFFER_NAME)
    await engine.start()
    try:
        yield Inspector(metadata, mesh, engine, view)
    finally:
        await engine.close()
