"""Who has to give way when nothing is left to evict (model m5_pool). Pure: ``now`` in seconds, passed in.

    asks         may abort
    growth       landings and prefills, older ones too (rule: growth_first); then younger running requests
    landing      younger landings and prefills, never a running request (rules: only_younger, class_order)
    prefill      the same
    others       nobody

Of those the youngest goes first, running ones last (rule: abort_youngest). Growth that finds nobody is told that the
pool is full and preempts itself (rule: self): that is decode's part.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.store.pool import Pool
from services.store.slots import State
from services.store.waiting import GROWTH_RANK, STRONG_RANK, Want
from shared.engines.base import Owner, PoolClass

PATIENCE = 2.0
"""Seconds in which an aborted holder is expected to let go. Then another one is aborted: it may be stopped."""

Holder = tuple[int, str]
"""Connection and owner id."""


@dataclass(frozen=True)
class Victim:
    connection: int
    owner: Owner


class Preemption:
    """Remembers who was aborted already: what they hold is coming (rule: quarantine_ends)."""

    def __init__(self, pool: Pool, agent: int) -> None:
        self._pool = pool
        self._agent = agent
        self._aborted: dict[Holder, float] = {}

    def choose(self, now: float, want: Want, keep: int) -> list[Victim]:
        """Whom to abort now, so that ``want`` is met with ``keep`` slots left for others before it. Nobody where what
        is coming will do, and nobody where all that may be aborted would not do: a request never ends in vain."""
        self._forget()
        if want.rank > STRONG_RANK:
            return []
        short = self._pool.slots.short(want.slots, want.pool_class, keep)
        waited = [holder for holder, since in self._aborted.items() if now - since < PATIENCE]
        short -= len(self._freed_by(waited))
        if short <= 0:
            return []
        chosen = list(waited)
        victims: list[Victim] = []
        for victim in self._able(want):
            chosen.append((victim.connection, victim.owner.id))
            victims.append(victim)
            if len(self._freed_by(chosen)) - len(self._freed_by(waited)) >= short:
                for one in victims:
                    self._aborted[one.connection, one.owner.id] = now
                return victims
        return []

    def _forget(self) -> None:
        for holder in [holder for holder in self._aborted if not self._pool.held_by_owner(*holder)]:
            del self._aborted[holder]

    def _able(self, want: Want) -> list[Victim]:
        """All that may be aborted for ``want``, the first to go first."""
        growth = want.rank == GROWTH_RANK
        found: list[tuple[bool, float, Victim]] = []
        for (connection, owner_id), holds in self._pool.owners():
            hard = [hold for hold in holds if not hold.soft]
            if (
                connection == self._agent
                or owner_id == want.owner
                or (connection, owner_id) in self._aborted
                or not hard
            ):
                continue
            running = any(hold.pool_class is PoolClass.GROWTH for hold in hard)
            working = running or any(hold.pool_class in (PoolClass.LANDING, PoolClass.PREFILL) for hold in hard)
            owner = hard[0].owner
            younger = owner.age > want.age
            if working and (younger or (growth and not running)) and (growth or not running):
                found.append((running, -owner.age, Victim(connection, owner)))
        found.sort(key=lambda entry: entry[:2])
        return [victim for _, _, victim in found]

    def _freed_by(self, holders: list[Holder]) -> set[int]:
        """Slots that nobody holds once these have let go; transfers out of them end by themselves."""
        count: dict[int, int] = {}
        for holder in holders:
            for hold in self._pool.held_by_owner(*holder):
                if not hold.soft:
                    count[hold.slot] = count.get(hold.slot, 0) + 1
        slots = self._pool.slots
        return {slot for slot, n in count.items() if slots[slot].holds == n and slots[slot].state is not State.FREE}
