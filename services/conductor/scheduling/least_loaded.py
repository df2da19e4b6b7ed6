"""Load balancing: the shortest predicted queue, wherever the cache is; what is cheaper to fetch is fetched."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.decision import Prices
from services.conductor.scheduling.global_cache import cheaper_branch
from services.conductor.scheduling.policy import LeastStep, first_by
from services.conductor.scheduling.views import Ask, PrefillView, SourceView


class LeastLoaded(LeastStep):
    name = "least_loaded"

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        return cheaper_branch(ask, view, sources, threshold=1.0)

    def choose(self, ask: Ask, prices: Prices) -> int:
        return first_by(np.flatnonzero(prices.view.open), prices.view.queue, prices.view.turn)
