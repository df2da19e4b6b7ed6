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
        return Prices.unfetched(view, closed_out(view, price), work)
    fetched, its_work, source = fetch(ask, view, sources, threshold)
    wins = fetched < price
    np.copyto(price, fetched, where=wins)
    np.copyto(work, its_work, where=wins)
    if isinstance(source, int):
        blocks, rows = wins * int(sources.blocks[source]), wins * (source + 1) - 1
    else:
        blocks, rows = np.where(wins, sources.blocks[source], 0), np.where(wins, source, -1)
    return Prices(view, closed_out(view, price), work, blocks, rows)


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
        rows = near(prices.price, self.options)
        if len(rows) > 1:
            work = prices.work.take(rows)
            slack = self.options.tie_ratio * float(prices.price[prices.price.argmin()]) + self.options.tie_seconds
            rows = rows[work <= work[work.argmin()] + slack]
        return first_by(rows, prices.view.queue, prices.view.turn)
