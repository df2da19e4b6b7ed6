"""Which prefixes are asked for most, and how often. Pure; time is passed in.

A chain is known as deep as it was trodden: each request leaves its mark on the blocks that are known already, and on as
many again. So prompts that nobody repeats leave little, and what many share is known to its end after a few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shared.blocks import KEY, key_count

HALF_LIFE = 10.0
"""Seconds in which half of what is not asked for again is forgotten."""

FIRST = 4
"""Blocks of a chain that its first request leaves a mark on."""

FAINT = 0.05
"""A mark weaker than this is taken away."""


@dataclass(slots=True)
class Mark:
    """``weight`` at time ``at``: requests, decayed. ``parent``: key of the block before, b"" for the first."""

    weight: float
    at: float
    parent: bytes


@dataclass(frozen=True)
class HotChain:
    """``rates``: requests a second for each block of ``keys``, never growing along it."""

    keys: bytes
    rates: tuple[float, ...]


class Heat:
    """``most``: marks kept; the faintest go first."""

    def __init__(self, most: int = 50_000, half_life: float = HALF_LIFE) -> None:
        self._marks: dict[bytes, Mark] = {}
        self._most = most
        self._decay = math.log(2) / half_life

    def __len__(self) -> int:
        return len(self._marks)

    def asked(self, keys: bytes, now: float) -> None:
        """A request with this chain was placed."""
        known, parent = 0, b""
        for at in range(key_count(keys)):
            key = keys[at * KEY : (at + 1) * KEY]
            mark = self._marks.get(key)
            if mark is None:
                if at >= 2 * known + FIRST:
                    return
                self._marks[key] = Mark(1.0, now, parent)
            else:
                known = at + 1
                mark.weight, mark.at = self._weight(mark, now) + 1.0, now
            parent = key

    def rate(self, key: bytes, now: float) -> float:
        """Requests a second."""
        mark = self._marks.get(key)
        return self._weight(mark, now) * self._decay if mark else 0.0

    def hot(self, least: float, now: float) -> list[HotChain]:
        """The longest chains of which every block is asked for ``least`` times a second or more; hottest first."""
        rates = {key: rate for key in self._marks if (rate := self.rate(key, now)) >= least}
        inner = {self._marks[key].parent for key in rates}
        chains = [self._chain(key, now) for key in rates if key not in inner]
        return sorted((chain for chain in chains if chain.keys), key=lambda chain: -chain.rates[0])

    def tidy(self, now: float) -> None:
        """Now and then: forget what is faint, and the faintest where there is too much. A block's mark is never fainter
        than those after it, so that chains lose their ends first."""
        weights = {key: self._weight(mark, now) for key, mark in self._marks.items()}
        limit = FAINT
        if len(weights) > self._most:
            limit = max(limit, sorted(weights.values())[len(weights) - self._most - 1])
        for key, weight in weights.items():
            if weight <= limit:
                del self._marks[key]

    def _weight(self, mark: Mark, now: float) -> float:
        return mark.weight * math.exp(-self._decay * (now - mark.at))

    def _chain(self, key: bytes, now: float) -> HotChain:
        """From the first block to this one; empty where a block on the way is forgotten."""
        path = list(self._path(key))[::-1]
        if self._marks[path[0]].parent:
            return HotChain(b"", ())
        rates = [self.rate(one, now) for one in path]
        for at in range(len(rates) - 2, -1, -1):  # the further blocks were first marked later
            rates[at] = max(rates[at], rates[at + 1])
        return HotChain(b"".join(path), tuple(rates))

    def _path(self, key: bytes) -> Iterator[bytes]:
        while mark := self._marks.get(key):
            yield key
            key = mark.parent
