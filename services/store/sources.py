"""Whether blocks on this node's SSD are had from there, or from another agent's DRAM that is quicker. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.store.rates import ASSUMED
from shared.index import DRAM

WORTH = 0.8
"""Another agent is asked where that is predicted to take less than this share of the disk's time."""

ASKING = 0.002
"""Seconds for the index and a lease, before the first byte comes from another agent."""


@dataclass(frozen=True)
class Copy:
    """A copy that agent ``agent`` probably has, at ``tier``. ``backlog``: bytes of outgoing reads queued there."""

    agent: str
    tier: int = DRAM
    backlog: int = 0


@dataclass(frozen=True)
class Disk:
    """``rate``: bytes per second, 0.0 while nobody has measured it. ``queued``: bytes that it has to read before."""

    rate: float = 0.0
    queued: int = 0

    def seconds(self, size: int) -> float:
        return (self.queued + size) / self.rate if size else 0.0


@dataclass(frozen=True)
class Elsewhere:
    """Blocks that ``agent`` should be asked for."""

    agent: str
    keys: list[bytes]


def is_worth_asking(sizes: Mapping[bytes, int], disk: Disk, link: float) -> bool:
    """Could any agent be quicker? A disk that was never measured is measured first. ``sizes``: bytes of each block on
    the disk; ``link``: bytes per second, 0.0 while nobody has measured it."""
    size = sum(sizes.values())
    return bool(size and disk.rate) and ASKING + size / (link or ASSUMED) < WORTH * disk.seconds(size)


def elsewhere(
    sizes: Mapping[bytes, int], copies: Mapping[bytes, Sequence[Copy]], disk: Disk, link: float
) -> Elsewhere | None:
    """The agent that makes it quickest, and what it would send; the disk reads the rest. None: the disk alone is as
    quick, or nearly."""
    held: dict[str, list[bytes]] = {}
    backlog: dict[str, int] = {}
    for key in sizes:
        for copy in copies.get(key, ()):
            if copy.tier == DRAM:
                held.setdefault(copy.agent, []).append(key)
                backlog[copy.agent] = copy.backlog
    total, rate = sum(sizes.values()), link or ASSUMED

    def seconds(agent: str) -> float:
        sent = sum(sizes[key] for key in held[agent])
        return ASKING + (backlog[agent] + sent) / rate + disk.seconds(total - sent)

    best = min(held, key=seconds, default=None)
    if best is None or seconds(best) >= WORTH * disk.seconds(total):
        return None
    return Elsewhere(best, held[best])
