"""One interface for all policies, and the ways to choose among equals."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.conductor.scheduling.decision import Prices
from services.conductor.scheduling.views import Ask, Bools, DecodeView, Floats, Ints, PrefillView, SourceView


@dataclass
class PolicyOptions:
    """``threshold``: kvcache_balancing_threshold. At 1 only the price decides; above, copies that would pay are
    forgone: at 2, every turn of a chat would compute the answer before it again, which decode alone holds.

    Prices within ``tie_ratio`` and ``tie_seconds`` of the least count as equal: predictions are no better than that,
    and strict order would make one instance hot.
    """

    threshold: float = 1.0
    tie_ratio: float = 0.05
    tie_seconds: float = 0.001
    rng: random.Random = field(default_factory=random.Random)


class Policy(Protocol):
    """Chooses the prefill instance (with or without a fetch), then the decode instance. Holds no cluster state."""

    name: str

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        """All instances, closed ones at inf."""

    def choose(self, ask: Ask, prices: Prices) -> int:
        """Row of the prefill instance; at least one is open."""

    def choose_decode(self, view: DecodeView, steps: Floats, room: Bools) -> int:
        """Row of the decode instance among those with ``room`` (at least one); ``steps`` are predicted TBTs."""


FEW = 32
"""Rows among which the first is found faster without numpy."""


def near(values: Floats, options: PolicyOptions) -> tuple[Ints, float]:
    """Rows equal to the least value, which is finite, within the options' tolerance; and the most that still is."""
    limit = float(values[values.argmin()]) * (1.0 + options.tie_ratio) + options.tie_seconds
    return (values <= limit).nonzero()[0], limit


def closed_out(view: PrefillView, price: Floats) -> Floats:
    """``price``, which is the caller's own, with inf where an instance is closed."""
    if np.count_nonzero(view.open) < len(price):
        price[~view.open] = np.inf
    return price


def first_by(rows: Ints, *keys: Floats | Ints) -> int:
    """That of ``rows`` with the least keys, in order."""
    if len(rows) <= FEW:
        few: list[int] = rows.tolist()
        if len(few) == 1:
            return few[0]
        least: int = min(zip(*[key.take(rows).tolist() for key in keys], few, strict=True))[-1]
        return least
    for key in keys[:-1]:
        if len(rows) == 1:
            return int(rows[0])
        values = key.take(rows)
        rows = rows[values == values[values.argmin()]]
    return int(rows[keys[-1].take(rows).argmin()])


class LeastStep:
    """Decode choice shared by all but the baselines: least predicted TBT when prefill ends, ties by requests assigned,
    then by turn."""

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options

    def choose_decode(self, view: DecodeView, steps: Floats, room: Bools) -> int:
        if np.count_nonzero(room) < len(room):
            steps = np.where(room, steps, np.inf)
        return first_by(near(steps, self.options)[0], view.assigned, view.turn)
