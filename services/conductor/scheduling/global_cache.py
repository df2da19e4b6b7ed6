"""The default policy: Algorithm 1 with both branches priced, sources of any role, and overlapped fetches."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.decision import Prices
from services.conductor.scheduling.policy import LeastStep, closed_out, first_by, near
from services.conductor.scheduling.pricing import fetch, recompute
from services.conductor.scheduling.views import Ask, PrefillView, SourceView


def cheaper_branch(ask: Ask, view: PrefillView, sources: SourceView, threshold: float) -> Prices:
    """Per instance the cheaper of computing and fetching; fetching only beyond the threshold."""
    price, work = recompute(ask, view, sources, view.own, view.ready)
    if not len(sources.agents):
        return Prices(view, closed_out(view, price), work)
    fetched, its_work, source = fetch(ask, view, sources, threshold)
    wins = fetched < price
    np.minimum(price, fetched, out=price)
    np.copyto(work, its_work, where=wins)
    return Prices(view, closed_out(view, price), work, wins, source, sources.blocks)


class GlobalCache(LeastStep):
    """Least predicted time to first token; equals by work, then by queue, then by turn.

    By work: of two that would be equally early, one that waits for a prefix being computed there and one that computes
    it again, the first leaves the cluster more to give. Small differences in work count as none, or a first block
    that all prompts share would gather them.
    """

    name = "global_cache"

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        return cheaper_branch(ask, view, sources, self.options.threshold)

    def choose(self, ask: Ask, prices: Prices) -> int:
        rows, limit = near(prices.price, self.options)
        if len(rows) > 1:
            work = prices.work.take(rows)
            slack = limit - float(prices.price[prices.price.argmin()])
            rows = rows[work <= work[work.argmin()] + slack]
        return first_by(rows, prices.view.queue, prices.view.turn)
