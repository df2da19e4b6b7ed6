"""Admission: who is refused, when it should come back, and what is kept for those who were told so."""

from __future__ import annotations

import math

from services.conductor.dispatch import metrics
from services.conductor.dispatch.backlog import Backlog
from services.conductor.dispatch.rejected import late, rejected
from services.conductor.dispatch.schedule_spans import refused_early
from services.conductor.dispatch.settings import DispatchSettings
from services.conductor.generation import BYTES_PER_TOKEN, Generation
from services.conductor.scheduling import Kept, Lane, Ledger, Objectives, Rejection, Shortage, Turn, VirtualQueue
from services.conductor.scheduling.margin import Margin
from services.conductor.scheduling.scheduler import leaving
from shared.errors import Contended, MooncakeError, Unavailable

CLOSEST = 3
"""Candidates that the span of a refusal at stage 0 names: under overload most spans are of refusals."""


class Gatekeeper:
    """Times in seconds of the loop's clock. ``rejected``: how many were refused."""

    def __init__(self, settings: DispatchSettings, ledger: Ledger) -> None:
        self.backlog = Backlog()
        self.rejected = 0
        self._settings = settings
        self._ledger = ledger
        self._queue = VirtualQueue()
        self._margin = Margin()

    def consider(
        self,
        now: float,
        prompt_bytes: int,
        slo_ttft_ms: int,
        ticket: int,
        prompt_tokens: int,
        blocks: int,
        priority: int = 0,
    ) -> None:
        """Stage 0, before tokenizing. ``prompt_tokens``: it has no fewer (0: nothing is known); ``blocks``: of KV that
        prompt and answer need at least; ``priority``: it is no more urgent. Raises Contended, Unavailable."""
        self._check_backlog()
        allowed = (slo_ttft_ms or self._settings.slo_ttft_ms) / 1000
        kept = self.kept(now, allowed, ticket)
        self._check_room(now, blocks, allowed, ticket, kept)
        likely = max(prompt_tokens, prompt_bytes // BYTES_PER_TOKEN)
        turn = Turn(allowed, self._settings.queue_overtake, priority)
        self._check_first_token(now, prompt_tokens, likely, turn, ticket, kept)

    def _check_backlog(self) -> None:
        try:
            self.backlog.check()
        except Contended:
            self._count("backlog")
            refused_early("backlog")
            raise

    def _check_room(self, now: float, blocks: int, allowed: float, ticket: int, kept: Kept) -> None:
        if self._ledger.decodes.places(blocks) > kept.requests:
            return
        wanted = Objectives(allowed, self._settings.slo_tbt_ms / 1000)
        refused_early("no_room", allowed=allowed)
        no_room = Rejection("no_room", shortage=leaving(self._ledger.decodes.view(now, ()), wanted))
        raise self.refuse(now, ticket, no_room, wanted)

    def _check_first_token(self, now: float, tokens: int, likely: int, turn: Turn, ticket: int, kept: Kept) -> None:
        """``tokens`` are sure, and decide. ``likely``: by the size of the body, which says little (escapes, other
        fields); only how long others will have to wait is judged by it."""
        allowed, found = turn.objective, self._ledger.prefills.soonest(tokens, now, turn)
        if found is None:
            raise Unavailable("no_prefill: no instance takes new work", field="no_prefill", retry_after_ms=1000)
        first, least, model = found
        soonest = first + kept.seconds
        if soonest <= allowed:
            return
        self._count("stage0")
        refused_early("stage0", soonest, allowed, lambda: self._ledger.prefills.at_best(tokens, now, CLOSEST))
        takes = min(model.seconds(likely, 0), allowed) / self._ledger.prefills.opened  # more is never computed
        late_by = soonest - allowed if least <= allowed else math.inf
        retry = self._queue.refuse(now, ticket, Shortage(Lane.PREFILL, late_by, takes, allowed))
        why = late("the first token", soonest, allowed)
        raise Contended(
            f"ttft: even at the emptiest instance {why}",
            field="ttft",
            retry_after_ms=math.ceil(retry * 1000),
            predicted_ms=round(soonest * 1000),
            limit_ms=round(allowed * 1000),
        )

    def kept(self, now: float, objective: float, ticket: int) -> Kept:
        """What a request has to leave to others, and to the errors of predictions. To others nothing, where it is one
        of them."""
        margin = self._margin.of(objective)
        if not len(self._queue) or self._queue.returns(now, ticket):
            return Kept(margin)
        kept = self._queue.kept(now, objective)
        return Kept(kept.seconds + margin, kept.requests)

    def first_token(self, predicted: float, actual: float) -> None:
        """Seconds from placing a request until its first token."""
        self._margin.observe(actual - predicted)

    def refuse(self, now: float, ticket: int, rejection: Rejection, wanted: Objectives) -> MooncakeError:
        """What the client is told."""
        self._count(rejection.reason)
        shortage = rejection.shortage
        retry = self._queue.refuse(now, ticket, shortage) if shortage else 1.0
        return rejected(rejection, retry, wanted)

    def accepted(self, now: float, generation: Generation) -> None:
        if len(self._queue):
            self._queue.served(now, generation.ticket)

    def show(self) -> None:
        metrics.RETURNING.set(len(self._queue))
        metrics.MARGIN.set(max(self._margin.seconds, 0.0))

    def _count(self, reason: str) -> None:
        metrics.REJECTED.labels(reason).inc()
        self.rejected += 1
