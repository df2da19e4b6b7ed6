"""Policies to compare with: none of them fetches."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.decision import Prices
from services.conductor.scheduling.policy import LeastStep, PolicyOptions, closed_out, first_by, near
from services.conductor.scheduling.pricing import recompute
from services.conductor.scheduling.views import Ask, Bools, DecodeView, Floats, PrefillView, SourceView


def local_prices(ask: Ask, view: PrefillView) -> Prices:
    """What each instance would take with its own cache alone."""
    price, work = recompute(ask, view, SourceView.none(), view.own, view.ready)
    return Prices(view, closed_out(view, price), work)


class LocalCache(LeastStep):
    """Least predicted time to first token, each instance with its own cache only."""

    name = "local_cache"

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        return local_prices(ask, view)

    def choose(self, ask: Ask, prices: Prices) -> int:
        return first_by(near(prices.price, self.options)[0], prices.view.queue, prices.view.turn)


class RoundRobin:
    """In turn, for both roles."""

    name = "round_robin"

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        return local_prices(ask, view)

    def choose(self, ask: Ask, prices: Prices) -> int:
        return first_by(np.flatnonzero(prices.view.open), prices.view.turn)

    def choose_decode(self, view: DecodeView, steps: Floats, room: Bools) -> int:
        return first_by(np.flatnonzero(room), view.turn)


class RandomChoice:
    """Uniform, for both roles, from the options' generator."""

    name = "random"

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        return local_prices(ask, view)

    def choose(self, ask: Ask, prices: Prices) -> int:
        return int(self.options.rng.choice(np.flatnonzero(prices.view.open).tolist()))

    def choose_decode(self, view: DecodeView, steps: Floats, room: Bools) -> int:
        return int(self.options.rng.choice(np.flatnonzero(room).tolist()))
