"""What the scheduler answers: a placement, or why not and when to come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.conductor.scheduling.returning import Shortage
from services.conductor.scheduling.views import Bools, Floats, Ints, PrefillView


@dataclass(frozen=True)
class Candidate:
    """How one prefill instance was priced; seconds."""

    instance: str
    own_blocks: int
    fetch_blocks: int
    queue: float
    price: float


@dataclass(slots=True)
class Prices:
    """Every prefill instance priced for one request. ``price``: predicted seconds until its first token (inf: closed).
    ``work``: seconds of prefill proper, with the prefix that it would have. ``fetches``: whether the price assumes a
    fetch (None: nowhere), ``sources``: the row of its source (for all or for each), ``lengths``: blocks by that row."""

    view: PrefillView
    price: Floats
    work: Floats
    fetches: Bools | None = None
    sources: Ints | int = -1
    lengths: Sequence[int] = ()

    def fetch(self, row: int) -> tuple[int, int]:
        """(blocks of the prefix that it would have with its fetch, row of the source); (0, -1) without one."""
        if self.fetches is None or not self.fetches[row]:
            return 0, -1
        source = self.sources if isinstance(self.sources, int) else int(self.sources[row])
        return self.lengths[source], source

    def candidates(self, limit: int) -> list[Candidate]:
        """The cheapest, least first."""
        view = self.view
        rows = np.argsort(self.price, kind="stable")[:limit].tolist()
        return [
            Candidate(view.ids[r], int(view.own[r]), self.fetch(r)[0], float(view.queue[r]), float(self.price[r]))
            for r in rows
            if np.isfinite(self.price[r])
        ]


@dataclass(slots=True)
class Decision:
    """``prefill``, ``decode``: instance ids. ``fetch_blocks``: prefix length to have from the store, 0 to compute what
    is not at hand. ``sources``: (agent, blocks), the planned one first. ``prefix_blocks``: prefix expected not to be
    computed. Times in seconds: ``ttft`` from now, ``compute`` the prefill alone, ``alone`` the same where nobody before
    it in the queue has computed anything of it, ``transfer`` of the fetch; ``tbt`` between tokens, the mean of the
    worst tenth; ``step`` as a rule; ``promised``: ``tbt`` at most (inf: nothing was promised)."""

    prefill: str
    decode: str
    fetch_blocks: int
    sources: tuple[tuple[str, int], ...]
    prefix_blocks: int
    queue: float
    compute: float
    transfer: float
    ttft: float
    tbt: float
    step: float
    prices: Prices
    promised: float = np.inf
    alone: float = 0.0

    def candidates(self, limit: int = 8) -> list[Candidate]:
        return self.prices.candidates(limit)


@dataclass(frozen=True)
class Rejection:
    """``reason``: ttft, tbt, no_room (contended), does_not_fit (never), no_prefill, no_decode (nobody to ask). ``ttft``
    (from arrival), ``tbt``: as predicted, 0 where they were not. ``limit``: the objective that would be missed, in
    seconds. ``shortage``: where waiting helps. ``prices``: what prefill instances would have taken, where any was
    asked."""

    reason: str
    ttft: float = 0.0
    tbt: float = 0.0
    limit: float = 0.0
    shortage: Shortage | None = None
    prices: Prices | None = field(default=None, compare=False, repr=False)

    @property
    def predicted(self) -> float:
        """Of the objective that would be missed."""
        return {"ttft": self.ttft, "tbt": self.tbt}.get(self.reason, 0.0)

    @property
    def retry_after(self) -> float:
        """Seconds until it would be accepted, were it alone; inf: never."""
        return self.shortage.late if self.shortage else 1.0

    def candidates(self, limit: int = 8) -> list[Candidate]:
        return self.prices.candidates(limit) if self.prices is not None else []
