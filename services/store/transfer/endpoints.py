"""Which peers stay connected: a cap with SIEVE eviction (Zhang et al., NSDI 2024). Pure.

New ones enter at the head; a hand walks from the tail to the head, sparing those used since it last passed and
those that are busy, and evicts the first other one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EndpointPool(Generic[K]):
    """``cap`` members at most."""

    def __init__(self, cap: int) -> None:
        self._cap = max(1, cap)
        self._order: list[K] = []  # tail (oldest) first
        self._visited: dict[K, bool] = {}
        self._hand = 0

    def __contains__(self, key: K) -> bool:
        return key in self._visited

    def __len__(self) -> int:
        return len(self._order)

    def touch(self, key: K) -> None:
        if key in self._visited:
            self._visited[key] = True

    def admit(self, key: K, busy: Callable[[K], bool]) -> tuple[bool, K | None]:
        """(admitted, who was evicted for it). Not admitted: everyone is busy, try again later."""
        if key in self._visited:
            self.touch(key)
            return True, None
        victim = None
        if len(self._order) >= self._cap:
            victim = self._evict(busy)
            if victim is None:
                return False, None
        self._order.append(key)
        self._visited[key] = False
        return True, victim

    def remove(self, key: K) -> None:
        """It is not connected any more."""
        if key in self._visited:
            at = self._order.index(key)
            del self._order[at], self._visited[key]
            self._move(self._hand - (at < self._hand))

    def _evict(self, busy: Callable[[K], bool]) -> K | None:
        for _ in range(2 * len(self._order)):
            key = self._order[self._hand]
            if self._visited[key]:
                self._visited[key] = False
            elif not busy(key):
                self.remove(key)
                return key
            self._move(self._hand + 1)
        return None

    def _move(self, hand: int) -> None:
        """Past the head it is at the tail at once: who comes in meanwhile must not be the next to go."""
        self._hand = hand if hand < len(self._order) else 0
