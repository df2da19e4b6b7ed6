"""Where further copies of a block go, and which of too many are let go. Pure.

Copies on one node, or on one machine, are lost together: places that have none come first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """An agent as a place for blocks. ``machine`` is common to the nodes of one host. ``fill``: share of its slots in
    use; ``backlog``: bytes of outgoing reads queued there."""

    id: str
    node: str
    machine: str = ""
    fill: float = 0.0
    backlog: int = 0


def order_for_more(places: Iterable[Place], holders: Collection[str]) -> list[str]:
    """All agents without a copy, the best place first: each as if those before it had one."""
    taken = [place for place in places if place.id in holders]
    left = {place.id: place for place in places if place.id not in holders}
    out: list[str] = []
    while left:
        best = min(left.values(), key=lambda place: (_shared(place, taken), place.fill, place.backlog, place.id))
        taken.append(left.pop(best.id))
        out.append(best.id)
    return out


def order_to_drop(places: Sequence[Place], holders: Collection[str]) -> list[str]:
    """All agents with a copy, the one that is missed least first: each as if those before it had none."""
    left = {place.id: place for place in places if place.id in holders}
    out: list[str] = []
    while left:
        worst = max(left.values(), key=lambda place: (_lost_with(place, left.values()), place.fill, place.id))
        del left[worst.id]
        out.append(worst.id)
    return out


def _shared(place: Place, others: Iterable[Place]) -> tuple[int, int]:
    """Copies that would be lost with this one: on its node, on its machine."""
    others = list(others)
    nodes = sum(other.node == place.node for other in others)
    return nodes, sum(bool(place.machine) and other.machine == place.machine for other in others)


def _lost_with(place: Place, holders: Iterable[Place]) -> tuple[int, int]:
    return _shared(place, (other for other in holders if other is not place))
