"""One placement: match, decide, book. Synchronous and short: nothing else runs between looking and booking."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from services.conductor.dispatch import metrics
from services.conductor.dispatch.matching import AgentTable, Matcher
from services.conductor.dispatch.roster import Roster
from services.conductor.dispatch.schedule_spans import describe
from services.conductor.dispatch.settings import DispatchSettings
from services.conductor.generation import Generation
from services.conductor.scheduling import Ask, Booking, Decision, Kept, Ledger, Objectives, Rejection, Scheduler, Turn
from services.conductor.scheduling.returning import NOTHING_KEPT
from shared.messages import Ref
from shared.records import PREFILL
from shared.telemetry import tracer


@dataclass(frozen=True)
class Placement:
    """The owner ends ``booking``."""

    decision: Decision
    booking: Booking
    ask: Ask
    prefill: Ref
    decode: Ref


class Placer:
    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        roster: Roster,
        agents: AgentTable,
        matcher: Matcher,
        settings: DispatchSettings,
    ) -> None:
        self.matcher = matcher
        self.ledger = ledger
        self._scheduler = scheduler
        self._roster = roster
        self._agents = agents
        self._settings = settings

    def place(
        self,
        generation: Generation,
        tokens: int,
        keys: bytes,
        drawn: int,
        avoid: Collection[Ref],
        objectives: Objectives | None,
        now: float,
        kept: Kept = NOTHING_KEPT,
    ) -> Placement | Rejection:
        """``tokens``, ``keys``: of prompt and ``drawn`` outputs so far. ``avoid``: incarnations out of the question.
        ``kept``: what it has to leave to others."""
        with tracer().start_as_current_span("schedule") as span:
            started = time.thread_time()
            ask = self._ask(generation, tokens, len(keys), drawn, now)
            if ask is None:
                return Rejection("no_prefill")
            closed = [ref.id for ref in avoid if self._roster.get(ref)]
            strangers = [] if drawn else self._strangers(generation, avoid)
            matches = self._agents.matches(*self.matcher.lengths(keys))
            dram = self._agents.named(self.matcher.dram(keys))
            view = self.ledger.view(keys, matches, now, [*closed, *strangers], ask.block_size, dram)
            decided = self._scheduler.decide(ask, view, objectives, kept)
            if strangers and isinstance(decided, Rejection):  # home's queue is too long for another choice
                view = self.ledger.view(keys, matches, now, closed, ask.block_size, dram)
                decided = self._scheduler.decide(ask, view, objectives, kept)
            placed = self._book(decided, ask, keys, now) if isinstance(decided, Decision) else decided
            metrics.DECISION_SECONDS.observe(time.thread_time() - started)
            describe(span, decided, ask.waited, objectives)
            return placed

    def _strangers(self, generation: Generation, avoid: Collection[Ref]) -> list[str]:
        """The prefill instances that did not compute the prompt for a sibling. None, where that one takes no work."""
        home = generation.siblings.home if generation.siblings else None
        member = self._roster.get(home) if home and home not in avoid else None
        if home is None or member is None or not member.open:
            return []
        return [id for id, one in self._roster.members.items() if one.record.role == PREFILL and id != home.id]

    def _ask(self, generation: Generation, tokens: int, keys: int, drawn: int, now: float) -> Ask | None:
        namespace = self._roster.namespace
        if namespace is None:
            return None
        left = max(generation.sampling.max_tokens - drawn, 1)
        return Ask(
            tokens=tokens,
            blocks=keys // 16,
            block_size=namespace.block_size,
            block_bytes=namespace.geometry.slot_bytes,
            expected_output=min(left, self._settings.expected_output),
            waited=max(now - generation.arrived, 0.0),
            turn=Turn(
                (generation.slo_ttft_ms or self._settings.slo_ttft_ms) / 1000,
                self._settings.queue_overtake,
                generation.priority,
            ),
        )

    def _book(self, decision: Decision, ask: Ask, keys: bytes, now: float) -> Placement:
        members = self._roster.members
        booking = self.ledger.book(decision, ask, keys, now)
        prefill, decode = members[decision.prefill].record.ref, members[decision.decode].record.ref
        return Placement(decision, booking, ask, prefill, decode)
