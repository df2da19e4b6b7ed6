"""The reader's side of remote leases: asked for, renewed at half-life, given back together with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.store import peer_messages as peer
from services.store.leases import Borrowed
from services.store.peers import CALL_TIMEOUT, PeerCalls
from services.store.slab import Slab, boottime
from services.store.trace_context import carrier
from shared.errors import MooncakeError, ProtocolError
from shared.messages import Ref
from shared.telemetry import log

logger = log("store.fetch")

LINGER = 0.002
"""Seconds that leases which are over wait for the next call to their owner to go with."""

MAX_TTL = 8.0
"""Seconds of a lease that an owner may give: with what it keeps the slot for beyond it, ten."""


class Borrower:
    """One for an agent. Lives on its loop."""

    def __init__(self, calls: PeerCalls) -> None:
        self._calls = calls
        self._over: dict[tuple[Ref, str], list[int]] = {}

    async def lease(
        self, slab: Slab, owner: Ref, keys: bytes, carry: int, timeout: float
    ) -> tuple[peer.Leased, Borrowed]:
        """All layers of the blocks ``keys``; ``carry``: bytes that may come with the answer. Raises what the owner
        raises, PeerGone, DeadlineExceeded. What of it is leased must be ``kept``."""
        over = self._over.pop((owner, slab.name), [])
        sent = boottime()  # rule: from_send
        call = peer.Lease(slab.name, keys, 0, slab.geometry.layers, carry, over, carrier())
        try:
            leased: peer.Leased = await self._calls.ask(owner, call, peer.Leased, min(CALL_TIMEOUT, timeout))
        except BaseException:  # perhaps never said; to give back twice harms nobody
            for lease in over:
                self._give_back(slab.name, owner, lease)
            raise
        if leased.id and not 0 < leased.ttl <= MAX_TTL:
            self._give_back(slab.name, owner, leased.id)
            raise ProtocolError(f"a lease lasts up to {MAX_TTL:g} s, not {leased.ttl:g}", field="ttl")
        return leased, Borrowed(leased.id, leased.ttl, sent)

    @contextmanager
    def kept(self, slab: Slab, owner: Ref, borrowed: Borrowed) -> Iterator[None]:
        """Renewed at half-life while the block runs, then given back."""
        renewing: list[asyncio.Task[None]] = []

        def renew() -> None:
            renewing.append(asyncio.create_task(self._renew(slab, owner, borrowed)))

        half = asyncio.get_running_loop().call_later(max(0.0, borrowed.renew_at - boottime()), renew)
        try:
            yield
        finally:
            half.cancel()
            for task in renewing:
                task.cancel()
            self._give_back(slab.name, owner, borrowed.id)

    async def _renew(self, slab: Slab, owner: Ref, borrowed: Borrowed) -> None:
        while True:
            sent = boottime()
            try:
                renewed = await self._calls.ask(owner, peer.Renew(slab.name, borrowed.id), bool, CALL_TIMEOUT)
            except MooncakeError as e:
                logger.info("lease not renewed", owner=owner.id, error=e.message)
                return
            if not renewed:
                return
            borrowed.renewed(sent)
            await asyncio.sleep(max(0.0, borrowed.renew_at - boottime()))

    def _give_back(self, segment: str, owner: Ref, lease: int) -> None:
        """What is lost on the way ends by time at the owner."""
        over = self._over.setdefault((owner, segment), [])
        over.append(lease)
        if len(over) == 1:
            asyncio.get_running_loop().call_later(LINGER, self._tell, segment, owner)

    def _tell(self, segment: str, owner: Ref) -> None:
        over = self._over.pop((owner, segment), [])
        if over:
            self._calls.tell(owner, peer.Release(segment, over))
