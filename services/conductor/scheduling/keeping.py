"""How many copies hot prefixes should have, and what to bring and drop for it. Pure; time is passed in.

Chains are cut by the number of copies that their blocks deserve: the r-th longest holder should have the first
``lengths[r]`` blocks. Copies grow at once and shrink late: only when half as many requests again would not need them,
and that for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.conductor.scheduling.heat import HotChain
from shared.blocks import KEY

SLACK = 1.5
"""Copies are surplus when so many times the requests would not need them."""


@dataclass(frozen=True)
class KeepOptions:
    """``rate``: requests a second that one copy is meant for; 0: nothing is kept. ``most``: copies of one block.
    ``bytes_per_s``: that are brought for it. ``cool``: seconds for which copies must be surplus before they go."""

    rate: float = 1.0
    most: int = 8
    bytes_per_s: float = 256e6
    cool: float = 30.0


@dataclass(frozen=True)
class Home:
    """A prefill instance as a place for copies, with its node's agent. ``busy``: seconds of its queue."""

    instance: str
    agent: str
    busy: float = 0.0


@dataclass(frozen=True)
class Bring:
    """Have ``keys``, which follow ``before``, at this instance's node. ``sources``: agents that have them."""

    instance: str
    before: bytes
    keys: bytes
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """Let go of this node's copy of ``keys`` where ``keep`` others are left."""

    instance: str
    keys: bytes
    keep: int


@dataclass
class Kept:
    """A chain that has, or lately had, several copies. ``lengths``: by rank of the holder, as held against surplus.
    ``since``: when less than these were enough for the first time."""

    lengths: list[int] = field(default_factory=list)
    since: float = math.inf


class Keeping:
    """One for a keeper. ``chains`` by their keys."""

    def __init__(self, options: KeepOptions) -> None:
        self.options = options
        self.chains: dict[bytes, Kept] = {}
        self._room = 0.0
        self._filled = -math.inf

    @property
    def least(self) -> float:
        """Requests a second from which on one copy is not enough."""
        return self.options.rate

    def copies(self, rate: float) -> int:
        return max(1, min(self.options.most, math.ceil(rate / self.options.rate))) if self.options.rate else 1

    def lengths(self, rates: Sequence[float], homes: int) -> list[int]:
        """By rank: how many of the first blocks deserve more copies than the rank."""
        wanted = [min(self.copies(rate), homes) for rate in rates]
        return [sum(copies > rank for copies in wanted) for rank in range(max(wanted, default=0))]

    def plan(
        self,
        hot: Sequence[HotChain],
        homes: Sequence[Home],
        held: Callable[[bytes], Mapping[str, int]],
        rate_of: Callable[[bytes], float],
        block_bytes: int,
        now: float,
    ) -> list[Bring | Drop]:
        """``held``: chain -> blocks of it by agent, whoever has any. ``rate_of``: requests a second for a block."""
        self._refill(block_bytes, now)
        for chain in hot:
            if len(self.lengths(chain.rates, len(homes))) > 1:
                self.chains.setdefault(chain.keys, Kept())
        orders: list[Bring | Drop] = []
        for keys in sorted(self.chains, key=lambda keys: -rate_of(keys[:KEY])):
            orders += self._keep(keys, homes, held(keys), rate_of, block_bytes, now)
        return orders

    def _keep(
        self,
        keys: bytes,
        homes: Sequence[Home],
        held: Mapping[str, int],
        rate_of: Callable[[bytes], float],
        block_bytes: int,
        now: float,
    ) -> list[Bring | Drop]:
        kept = self.chains[keys]
        rates = [rate_of(keys[at : at + KEY]) for at in range(0, len(keys), KEY)]
        wanted = self.lengths(rates, len(homes))
        spare = self.lengths([SLACK * rate for rate in rates], len(homes))
        holders = sorted(homes, key=lambda home: (-held.get(home.agent, 0), home.busy, home.instance))
        orders = self._missing(keys, wanted, holders, held, block_bytes)
        if kept.lengths and _within(spare, kept.lengths):
            kept.since = min(kept.since, now)
        if not kept.lengths or not _within(spare, kept.lengths):
            kept.lengths, kept.since = _larger(kept.lengths, wanted), math.inf
        elif now - kept.since >= self.options.cool:
            orders += self._surplus(keys, spare, holders, held)
            kept.lengths, kept.since = spare, math.inf
        if len(spare) <= 1 and len(kept.lengths) <= 1:
            del self.chains[keys]
        return orders

    def _missing(
        self, keys: bytes, wanted: Sequence[int], holders: Sequence[Home], held: Mapping[str, int], block_bytes: int
    ) -> list[Bring | Drop]:
        """What can be had, from those that have it, as far as the budget goes."""
        orders: list[Bring | Drop] = []
        longest = max(held.values(), default=0)
        for length, home in zip(wanted, holders, strict=False):
            have, want = held.get(home.agent, 0), min(length, longest)
            want = min(want, have + int(self._room // block_bytes))
            if want > have:
                sources = sorted((a for a in held if a != home.agent and held[a] > have), key=lambda a: -held[a])
                orders.append(
                    Bring(home.instance, keys[: have * KEY][-KEY:], keys[have * KEY : want * KEY], tuple(sources))
                )
                self._room -= (want - have) * block_bytes
        return orders

    def _surplus(
        self, keys: bytes, spare: Sequence[int], holders: Sequence[Home], held: Mapping[str, int]
    ) -> list[Bring | Drop]:
        """The ends of what holders beyond the rank have, the least busy keeping theirs."""
        orders: list[Bring | Drop] = []
        for rank, home in enumerate(holders):
            first = spare[rank] if rank < len(spare) else 0
            have = held.get(home.agent, 0)
            for start, stop, keep in _runs(first, have, spare):
                orders.append(Drop(home.instance, keys[start * KEY : stop * KEY], keep))
        return orders

    def _refill(self, block_bytes: int, now: float) -> None:
        """A second's worth at most is saved up, and a block always fits."""
        rate = self.options.bytes_per_s
        passed = min(now - self._filled, 1.0)
        self._filled = now
        self._room = min(self._room + rate * passed, max(rate, float(block_bytes)))


def _within(lengths: Sequence[int], other: Sequence[int]) -> bool:
    """Less than ``other`` somewhere, and nowhere more."""
    pairs = [(lengths[r] if r < len(lengths) else 0, other[r]) for r in range(len(other))]
    return len(lengths) <= len(other) and all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _larger(one: Sequence[int], other: Sequence[int]) -> list[int]:
    size = max(len(one), len(other))
    return [max(one[r] if r < len(one) else 0, other[r] if r < len(other) else 0) for r in range(size)]


def _runs(first: int, have: int, spare: Sequence[int]) -> list[tuple[int, int, int]]:
    """Blocks [first, have) as (start, stop, copies that must be left), from the end to the front."""
    runs: list[tuple[int, int, int]] = []
    stop = have
    while stop > first:
        keep = max(1, sum(length >= stop for length in spare))
        start = max([first, *(length for length in spare if length < stop)])
        runs.append((start, stop, keep))
        stop = start
    return runs
