"""Who waits for slots, and what must be left for them (rules: older_first, growth_first)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.engines.base import Owner, PoolClass

RANK = {PoolClass.GROWTH: 0, PoolClass.LANDING: 1, PoolClass.PREFILL: 1, PoolClass.PREFETCH: 2, PoolClass.CACHE: 3}
"""Landing and prefill wait by age alone; prefetch and cache take what these leave."""

GROWTH_RANK, STRONG_RANK = 0, 1
"""The rank of growth, and the last one for which others are aborted."""


@dataclass(frozen=True, order=True)
class Want:
    """A wish of ``owner`` for ``slots`` slots, all or nothing. The order is that of being served: growth first, then
    the older request, then who came first."""

    rank: int
    age: float
    turn: int
    slots: int
    pool_class: PoolClass = field(compare=False)
    owner: str = field(compare=False)


class Line:
    """Waiting wishes of one pool, in the order in which they are tried."""

    def __init__(self) -> None:
        self._waiting: list[Want] = []
        self._turn = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Want]:
        return iter(tuple(self._waiting))

    def want(self, slots: int, owner: Owner, pool_class: PoolClass) -> Want:
        self._turn += 1
        return Want(RANK[pool_class], owner.age, self._turn, slots, pool_class, owner.id)

    def join(self, want: Want) -> None:
        self._waiting.append(want)
        self._waiting.sort()

    def leave(self, want: Want) -> None:
        self._waiting.remove(want)

    def kept_from(self, want: Want) -> int:
        """Slots that must be left after ``want`` is met, so that each of those before it could be met then. Growth
        heeds nobody."""
        if want.rank == GROWTH_RANK:
            return 0
        return max((other.slots for other in self._waiting if other < want), default=0)
