"""Remote leases, the only holds that end by time. Pure: ``now`` is seconds of CLOCK_BOOTTIME, passed in."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from shared.errors import Contended
from shared.messages import Ref

KEEP = 1.25
"""The owner keeps a leased slot this many ttls from the grant (``keep_1.25``); clocks drift by less."""


@dataclass(slots=True)
class Lease:
    """What one reader may read. ``until`` is the owner's end: the reader's is earlier."""

    id: int
    reader: Ref
    slots: list[int]
    bytes: int
    until: float


class LeaseTable:
    """The owner's side. The caller marks the slots as used while they are here (``owner_waits``) and lets go of what
    ``release`` and ``expire`` return. ``limit``: leases at one time, so that a reader goes to a replica instead."""

    def __init__(self, ttl: float, limit: int) -> None:
        self.ttl = ttl
        self._limit = limit
        self._leases: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def bytes(self) -> int:
        """Bytes that readers may be reading now: the backlog of outgoing reads."""
        return sum(lease.bytes for lease in self._leases.values())

    def grant(self, now: float, reader: Ref, slots: list[int], size: int) -> Lease:
        """Raises Contended at the limit."""
        if len(self._leases) >= self._limit:
            raise Contended(f"{self._limit} readers at once", retry_after_ms=round(self.ttl * 250))
        lease = Lease(secrets.randbits(63), reader, slots, size, now + KEEP * self.ttl)
        self._leases[lease.id] = lease
        return lease

    def renew(self, now: float, lease_id: int, reader: Ref) -> bool:
        """False: the lease is over, and stays so."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.reader != reader or lease.until <= now:
            return False
        lease.until = now + KEEP * self.ttl
        return True

    def release(self, lease_id: int, reader: Ref) -> list[int]:
        """The slots that the caller lets go of; none when the lease was over already."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.reader != reader:
            return []
        return self._leases.pop(lease_id).slots

    def expire(self, now: float) -> list[int]:
        """The slots of all leases that are over."""
        over = [lease.id for lease in self._leases.values() if lease.until <= now]
        return [slot for lease_id in over for slot in self._leases.pop(lease_id).slots]


@dataclass(slots=True)
class Borrowed:
    """The reader's side of one lease. ``sent`` is a time before the request was sent (``from_send``)."""

    id: int
    ttl: float
    sent: float

    @property
    def until(self) -> float:
        return self.sent + self.ttl

    @property
    def renew_at(self) -> float:
        """Half-life."""
        return self.sent + self.ttl / 2

    def renewed(self, sent: float) -> None:
        self.sent = max(self.sent, sent)

    def valid(self, now: float) -> bool:
        """What completes later is discarded (``discard``)."""
        return now < self.until
