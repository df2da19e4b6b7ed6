"""One caller's wish to have blocks here, and the holds that it takes of what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.context import Context

from services.store.reader import Outcome
from services.store.slab import Slab
from shared.engines.base import Fetched, Owner, PoolClass

HERE = Outcome()


@dataclass
class Ask:
    """One caller's wish. It takes hold of what arrives as long as it is open. ``disk_only``: what is on this node's SSD
    comes from there, however long it takes."""

    slab: Slab
    connection: int
    owner: Owner
    pool_class: PoolClass
    trace: Context | None = None
    disk_only: bool = False
    results: dict[bytes, Fetched] = field(default_factory=dict)
    open: bool = True

    def take(self, key: bytes, outcome: Outcome) -> None:
        if self.open and (key not in self.results or self.results[key].error):
            self.results[key] = self.hold(key, outcome)

    def give_back(self) -> None:
        """The asker has gone."""
        self.slab.release(self.connection, [f.held.hold for f in self.results.values() if f.held is not None])

    def hold(self, key: bytes, outcome: Outcome) -> Fetched:
        if outcome.error:
            return Fetched(None, outcome.transport, outcome.bytes, outcome.error)
        return self.hold_all([key], outcome)[0]

    def hold_all(self, keys: Sequence[bytes], outcome: Outcome = HERE) -> list[Fetched]:
        """``outcome`` is that of each."""
        slots, moved = self.slab.pool.slots, outcome.bytes
        return [
            Fetched(None, outcome.transport, moved, "evicted")
            if held is None
            else Fetched(held, outcome.transport, moved, length=slots[held.slot].length)
            for held in self.slab.pool.lease(keys, self.connection, self.owner, self.pool_class)
        ]
