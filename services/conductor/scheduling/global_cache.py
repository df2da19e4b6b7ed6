"""The default policy: Algorithm 1 with both branches priced, sources of any role, and overlapped fetches."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.decision import Prices
from services.conductor.scheduling.policy import LeastStep, first_by, near
from services.conductor.scheduling.pricing import fetch, recompute
from services.conductor.scheduling.views import Ask, PrefillView, SourceView


def cheaper_branch(ask: Ask, view: PrefillView, sources: SourceView, threshold: float) -> Prices:
    """Per instance the cheaper of computing and fetching; fetching only beyond the threshold."""
    compute = recompute(ask, view, view.own, view.ready)
    fetched, source = fetch(ask, view, sources, threshold)
    wins = fetched < compute
    price = np.where(view.open, np.minimum(compute, fetched), np.inf)
    if not len(sources.agents):
        return Prices(view, price, np.zeros(len(view.ids), dtype=np.int64), source)
    return Prices(view, price, np.where(wins, sources.blocks[source], 0), np.where(wins, source, -1))


class GlobalCache(LeastStep):
    """Least predicted time to first token; equals by queue, then by turn."""

    name = "global_cache"

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        return cheaper_branch(ask, view, sources, self.options.threshold)

    def choose(self, ask: Ask, prices: Prices) -> int:
        return first_by(near(prices.price, self.options), prices.view.queue, prices.view.turn)
