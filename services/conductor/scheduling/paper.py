"""Algorithm 1 of the paper (section 4.1), literally.

Gaps settled: a ratio over 0 is infinite when anybody has a match and 1 when nobody has; matches are looked for at
prefill instances only; the transfer is added to the queue, not overlapped; the first instance wins ties.
"""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.decision import Prices
from services.conductor.scheduling.policy import LeastStep, closed_out
from services.conductor.scheduling.pricing import cached_tokens
from services.conductor.scheduling.views import Ask, PrefillView, SourceView


class Paper(LeastStep):
    name = "paper"

    def price(self, ask: Ask, view: PrefillView, sources: SourceView) -> Prices:
        best, source = self.find_best_prefix_match(sources)
        ratio = np.divide(best, view.own, out=np.full(len(view.ids), np.inf if best else 1.0), where=view.own > 0)
        over = (ratio > self.options.threshold) & (best > view.own)
        prefix = np.where(over, best, view.own)
        moved = np.where(over, best - view.own, 0) * float(ask.block_bytes)
        transfer = (sources.backlog[source] + moved) / sources.rate[source] if source >= 0 else np.zeros(len(over))
        compute = view.seconds(ask.tokens, cached_tokens(ask, prefix))
        price = np.where(over, transfer, 0.0) + view.queue + compute
        return Prices(view, closed_out(view, price), compute, over, source, sources.blocks)

    def find_best_prefix_match(self, sources: SourceView) -> tuple[int, int]:
        """(blocks, source row) of the longest match at a prefill instance, (0, -1) when nobody has any."""
        blocks = [held if prefill else 0 for held, prefill in zip(sources.blocks, sources.prefill, strict=True)]
        best = max(blocks, default=0)
        return (best, blocks.index(best)) if best else (0, -1)

    def choose(self, ask: Ask, prices: Prices) -> int:
        return int(prices.price.argmin())
