"""The agent's answers about blocks as objects: removed, pinned and copied for any program of the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.store import local_messages as wire
from services.store.connection import Connection, Handler
from services.store.fetcher import Fetcher
from services.store.mailbox import SIZE as MAILBOX
from services.store.metrics import COMMITTED
from services.store.removal import Removal
from services.store.replication import MOST, Replication
from services.store.slab import boottime
from shared.blocks import KEY, split_keys
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import DoesNotFit, InvalidInput, PinLimit, QuotaExceeded

POSTED = {
    Kind.NEW: wire.Posted.STORED,
    Kind.PRESENT: wire.Posted.PRESENT,
    Kind.IN_PROGRESS: wire.Posted.LATER,
}

MAX_WAIT = 3600.0

PROMOTION = 2.0
"""Seconds that a lease or a pin waits for blocks of the SSD. What is not there by then is answered as absent."""


class ObjectService:
    """One for an agent. ``handlers`` by the type of the request."""

    def __init__(self, fetcher: Fetcher, removal: Removal, replicas: Replication) -> None:
        self._fetcher = fetcher
        self._replicas = replicas
        self._removal = removal
        self.handlers: Mapping[type, Handler] = {
            wire.Put: self._put,
            wire.Remove: lambda c, r: self._removal.remove(c.slab, keys_of(r.keys), bounded(r.timeout)),
            wire.ChangeReplica: self._change_replica,
            wire.LetGo: self._let_go,
            wire.Pin: self._pin,
            wire.Unpin: lambda c, r: c.slab.unpin(keys_of(r.keys), r.owner),
        }

    def _put(self, c: Connection, r: wire.Put) -> list[wire.Posted]:
        keys, by = keys_of(r.keys), r.by.checked()
        most = min(c.slab.geometry.slot_bytes, MAILBOX)
        if len(keys) != len(r.lengths) or not all(0 < n <= most for n in r.lengths) or sum(r.lengths) > MAILBOX:
            raise InvalidInput(f"a length of 1 to {most} for each key, {MAILBOX} together", field="lengths")
        try:
            held = c.slab.reserve_now(keys, c.id, *by)
        except (DoesNotFit, QuotaExceeded):
            held = None
        return [wire.Posted.LATER] * len(keys) if held is None else self._stored(c, held, r.lengths)

    @staticmethod
    def _stored(c: Connection, held: Sequence[Held], lengths: Sequence[int]) -> list[wire.Posted]:
        """The bytes, then the commit; the holds end with it."""
        new: list[tuple[Held, int]] = []
        try:
            for h, length, value in zip(held, lengths, c.mailbox.values(lengths), strict=True):
                if h.kind is Kind.NEW:
                    c.slab.memory.range(h.slot, length)[:] = value
                    new.append((h, length))
            holds, sizes = [h.hold for h, _ in new], [length for _, length in new]
            c.slab.commit(c.id, holds, b"", [h.key for h, _ in new], sizes, chained=False)
            COMMITTED.inc(len(new))
        finally:
            c.slab.release(c.id, [h.hold for h in held if h.hold])
        return [POSTED[h.kind] for h in held]

    async def _change_replica(self, connection: Connection, r: wire.ChangeReplica) -> list[wire.Copies]:
        if not 1 <= r.copies <= MOST:
            raise InvalidInput(f"{r.copies} copies; 1 to {MOST} are possible (remove takes all away)", field="copies")
        found = await self._replicas.change(connection.slab, keys_of(r.keys), r.copies, bounded(r.timeout))
        return [wire.Copies(c.agents, None if c.error is None else c.error.to_wire()) for c in found]

    async def _let_go(self, connection: Connection, r: wire.LetGo) -> list[bool]:
        if not 1 <= r.keep <= MOST:
            raise InvalidInput(f"{r.keep} copies to be left; 1 to {MOST} are possible", field="keep")
        return await self._replicas.drop(connection.slab, keys_of(r.keys), r.keep)

    async def _pin(self, c: Connection, r: wire.Pin) -> list[wire.Outcome]:
        keys = keys_of(r.keys)
        if not r.ttl > 0:
            raise InvalidInput(f"a pin lasts more than {r.ttl:g} s", field="ttl")
        async with self._fetcher.brought_up(c.slab, keys, Owner("pin/" + r.owner), PoolClass.CACHE, PROMOTION):
            return [self._pinned(c, key, r) for key in keys]

    @staticmethod
    def _pinned(c: Connection, key: bytes, r: wire.Pin) -> wire.Outcome:
        try:
            return wire.Outcome(c.slab.pinned.pin(boottime(), key, r.owner, r.hard, r.ttl))
        except PinLimit as e:
            return wire.Outcome(False, e.to_wire())


def keys_of(packed: bytes) -> list[bytes]:
    """Raises InvalidInput."""
    if len(packed) % KEY:
        raise InvalidInput(f"keys have {KEY} bytes each", field="keys")
    return split_keys(packed)


def bounded(timeout: float) -> float:
    """Everything that waits has a deadline. Raises InvalidInput for what is none (NaN too)."""
    if not 0 <= timeout <= MAX_WAIT:
        raise InvalidInput(f"a timeout is 0 to {MAX_WAIT:g} s", field="timeout")
    return timeout
