"""Reading blocks from one owner: lease, one-sided read, generation, time and checksum, commit."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

from services.store import peer_messages as peer
from services.store.borrowing import Borrower
from services.store.checksums import ON_LOOP, checksum
from services.store.leases import Borrowed
from services.store.metrics import CORRUPT, FETCHED, count_bytes
from services.store.peers import PeerCalls
from services.store.rates import Rate
from services.store.settings import StoreSettings
from services.store.slab import AGENT, Slab, boottime
from services.store.tenants import tag_of
from services.store.transfer.base import Op, Peer, Request, Result, Status, TransferEngine
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import ChecksumMismatch, LeaseExpired, PoolFull, ProtocolError, TransferError
from shared.messages import Ref
from shared.telemetry import log

logger = log("store.fetch")

Carry = Callable[[Peer], int]
"""Bytes of blocks that may come with the answer of that peer; 0 where they go another way than the answer."""


@dataclass(frozen=True)
class Wanted:
    """One block to bring; ``parent`` is its key's parent, b"" for none."""

    key: bytes
    parent: bytes


@dataclass(frozen=True)
class Outcome:
    """How one block came, or why not (an error code). ``bytes`` moved over ``transport``."""

    transport: str = ""
    bytes: int = 0
    error: str = ""


@dataclass
class Read:
    """What came of one owner's blocks. ``holds`` are the agent's own on what was committed: the caller ends them."""

    outcomes: dict[bytes, Outcome] = field(default_factory=dict)
    holds: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Copy:
    """One block on its way: from the owner's descriptor into a reserved slot of ours."""

    wanted: Wanted
    source: peer.Descriptor
    target: Held

    @property
    def parent(self) -> bytes:
        """The key before: as who asks knows it, else as the owner does."""
        return self.wanted.parent or self.source.parent


class RemoteReader:
    def __init__(
        self,
        engine: TransferEngine,
        calls: PeerCalls,
        settings: StoreSettings,
        threads: ThreadPoolExecutor,
        rate: Rate,
        carry: Carry,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._settings = settings
        self._threads = threads
        self._rate = rate
        self._carry = carry
        self._borrower = Borrower(calls)

    async def read(
        self, slab: Slab, source: Peer, wanted: Sequence[Wanted], owner: Owner, pool_class: PoolClass, timeout: float
    ) -> Read:
        """Raises MooncakeError when nothing could be had at all; single failures are in the outcomes. What is not in
        them is not at that owner."""
        began, keys = asyncio.get_running_loop().time(), b"".join(w.key for w in wanted)
        leased, borrowed = await self._borrower.lease(slab, source.ref, keys, self._carry(source), timeout)
        found = [(w, d) for w, d in zip(wanted, leased.blocks, strict=False) if d is not None]
        left = max(0.0, timeout - (asyncio.get_running_loop().time() - began))
        kept = self._borrower.kept(slab, source.ref, borrowed) if leased.id else nullcontext()
        with kept:
            if len(leased.blocks) != len(wanted) or (not leased.id and any(d.data is None for _, d in found)):
                raise ProtocolError("an agent answered for other blocks than it was asked for")
            return await self._into_pool(slab, source.ref, borrowed, found, owner, pool_class, left)

    # -- the bytes -------------------------------------------------------------------------------------

    async def _into_pool(
        self,
        slab: Slab,
        owner_ref: Ref,
        borrowed: Borrowed,
        found: Sequence[tuple[Wanted, peer.Descriptor]],
        owner: Owner,
        pool_class: PoolClass,
        timeout: float,
    ) -> Read:
        deadline = asyncio.get_running_loop().time() + timeout
        room = slab.pool.room(pool_class)
        found, rest = found[:room], found[room:]  # the beginning of a prefix is worth having alone
        held = await slab.reserve([w.key for w, _ in found], AGENT, owner, pool_class, timeout)
        read = Read({w.key: Outcome(error=PoolFull.code) for w, _ in rest})
        read.holds += [h.hold for h in held if h.kind is Kind.PRESENT]
        copies: list[Copy] = []
        for (w, d), h in zip(found, held, strict=True):
            if h.kind is Kind.NEW and 0 < d.length == d.size <= slab.geometry.slot_bytes:
                copies.append(Copy(w, d, h))
            else:
                read.outcomes[w.key] = Outcome(error="" if h.kind is Kind.PRESENT else "in_progress")
        over = {h.hold for h in held if h.hold}
        try:
            results = self._unpack(slab, copies)
            if results is None:
                results = await self._transfer(slab, owner_ref, copies, deadline)
            arrived = await self._check(slab, owner_ref, borrowed, copies, results, read)
            self._commit(slab, arrived, owner, read)
            over -= set(read.holds)
            return read
        finally:  # the transfer has returned: nothing writes into the destinations any more (rule: dest_held)
            slab.release(AGENT, [h.hold for h in held if h.hold in over])

    @staticmethod
    def _unpack(slab: Slab, copies: Sequence[Copy]) -> list[Result] | None:
        """Blocks that came with the answer; None where they did not."""
        if not copies or copies[0].source.data is None:
            return None
        results: list[Result] = []
        for copy in copies:
            data, size = copy.source.data, copy.source.size
            if data is None or len(data) != size:
                raise ProtocolError("an agent sent a block of another length than it said")
            slab.memory.range(copy.target.slot, size)[:] = data
            results.append(Result(Status.COMPLETED, "tcp", size))
        return results

    async def _transfer(self, slab: Slab, owner_ref: Ref, copies: Sequence[Copy], deadline: float) -> list[Result]:
        stride = slab.memory.stride
        requests = [
            Request(
                Op.READ,
                slab.name,
                c.target.slot * stride,
                owner_ref,
                slab.name,
                c.source.offset,
                c.source.length,
                c.source.generation,
            )
            for c in copies
        ]
        left = max(0.001, deadline - asyncio.get_running_loop().time())
        if not requests:
            return []
        began = time.monotonic()
        results = await self._engine.transfer(requests, left)
        self._rate.add(sum(result.moved for result in results), time.monotonic() - began)
        return results

    async def _check(
        self,
        slab: Slab,
        owner_ref: Ref,
        borrowed: Borrowed,
        copies: Sequence[Copy],
        results: Sequence[Result],
        read: Read,
    ) -> list[Copy]:
        """The copies that are good; outcomes of all are set. The engine has compared the generations."""
        in_time = not borrowed.id or borrowed.valid(boottime())  # rule: discard
        arrived: list[Copy] = []
        for copy, result in zip(copies, results, strict=True):
            count_bytes(result.transport, "in", result.moved)
            error = result.error.code if result.error else "" if in_time else LeaseExpired.code
            if result.status is not Status.COMPLETED and not error:
                error = TransferError.code
            read.outcomes[copy.wanted.key] = Outcome(result.transport, result.moved, error)
            if not error:
                arrived.append(copy)
            elif result.error is not None:
                logger.info("block not read", owner=owner_ref.id, error=result.error.message)
        good = await self._verify(slab, arrived, read)
        for copy in (c for c in arrived if c not in good):
            CORRUPT.labels("fetched").inc()
            logger.warning("corrupt block", owner=owner_ref.id, key=copy.wanted.key.hex())
            read.outcomes[copy.wanted.key] = Outcome(error=ChecksumMismatch.code)
            self._calls.tell(owner_ref, peer.Corrupt(slab.name, copy.wanted.key, copy.source.generation))
        return good

    async def _verify(self, slab: Slab, arrived: Sequence[Copy], read: Read) -> list[Copy]:
        """Those whose bytes have the checksum of their commit, as far as the policy of their transport looks."""
        picked = {c.target.slot for c in arrived if self._looks(read.outcomes[c.wanted.key].transport)}

        def matches(copy: Copy) -> bool:
            if copy.target.slot not in picked:
                return True
            with slab.memory.range(copy.target.slot, copy.source.size) as data:
                return copy.source.checksum == checksum(data)

        def good() -> list[Copy]:
            return [copy for copy in arrived if matches(copy)]

        if sum(copy.source.size for copy in arrived) <= ON_LOOP:
            return good()
        return await asyncio.get_running_loop().run_in_executor(self._threads, good) if picked else list(arrived)

    def _looks(self, transport: str) -> bool:
        policy = self._settings.verify_over(transport)
        return policy == "always" or (policy == "sample" and random.random() < self._settings.verify_sample)

    @staticmethod
    def _commit(slab: Slab, arrived: Sequence[Copy], owner: Owner, read: Read) -> None:
        for run, chained in runs(arrived):
            slab.commit(
                AGENT,
                [copy.target.hold for copy in run],
                run[0].parent,
                [copy.wanted.key for copy in run],
                [copy.source.size for copy in run],
                fetched_by=owner.id or "fetch",
                chained=chained,
                checksums=[copy.source.checksum for copy in run],
                tenants=[copy.source.tenant or tag_of(owner.tenant) for copy in run],
            )
            read.holds += [copy.target.hold for copy in run]
            FETCHED.inc(len(run))


def runs(copies: Sequence[Copy]) -> Iterator[tuple[Sequence[Copy], bool]]:
    """Blocks that are committed together: those that follow each other (True), or that all have the same parent."""
    if len({copy.parent for copy in copies}) == 1 < len(copies):
        yield copies, False
        return
    begin = 0
    for at in range(1, len(copies) + 1):
        if at == len(copies) or copies[at].parent != copies[at - 1].wanted.key:
            yield copies[begin:at], True
            begin = at
