"""One request in flight: a thin shell around its attempts and its token stream. Lives as long as its iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from services.conductor.dispatch import events, metrics
from services.conductor.dispatch.asking import Letters, Work, work
from services.conductor.dispatch.attempts import Attempt, Attempts, Left, Side
from services.conductor.dispatch.effort import Effort
from services.conductor.dispatch.mesh import Mesh
from services.conductor.dispatch.placing import Placement
from services.conductor.dispatch.rejected import rejected
from services.conductor.dispatch.stream import TokenStream
from services.conductor.generation import Generation, Token
from services.conductor.scheduling import Kept, Objectives, Rejection
from services.conductor.scheduling.tail import jitter
from services.conductor.scheduling.urgency import due
from shared.errors import AttemptFailed, BusDown, Contended, DoesNotFit, MooncakeError, NoRoom, PoolFull
from shared.inbox import Inbox
from shared.messages import Ref, Usage
from shared.telemetry import log, tracer

BACKOFF = 0.1
LONGEST_BACKOFF = 1.0
FIRST_TOKEN_FACTOR = 4.0
"""A first token this many times later than predicted (and later than the stall bound) is a stall."""

NO_ROOM = frozenset({"no_room", "pool_full"})

BACKLOG = 1024
"""Events that wait for a slow reader. What comes beyond stays with the instance, which keeps outputs until they are
acknowledged: the gap is noticed when the reader has caught up, and asked for."""

logger = log("dispatch")


class Run:
    """``inbox``: what happened to it, from the bus, its own questions and the roster."""

    def __init__(self, mesh: Mesh, generation: Generation, now: float) -> None:
        self.generation = generation
        self.inbox = Inbox[events.Event]()
        self.attempts = Attempts(mesh.settings.max_attempts)
        self.stream = TokenStream(mesh.settings.silence_s, now)
        self.effort: Effort | None = None
        self._mesh = mesh
        self._loop = asyncio.get_running_loop()
        self._place_at: float | None = now
        self._place_until: float | None = None
        self._backoff = BACKOFF
        self._bus_lost: float | None = None
        self._failure: MooncakeError | None = None
        self._abandoned: MooncakeError | None = None
        self._objectives: Objectives | None = objectives(mesh, generation)

    async def tokens(self) -> AsyncGenerator[Token, None]:
        try:
            self._place_if_due()
            while not self.stream.complete:
                for token in self._take(await self._next()):
                    yield token
            self._finish()
        finally:
            self._close()

    def arrived(self, event: events.Arrived) -> None:
        """A token, unless too many wait already."""
        if len(self.inbox) < BACKLOG:
            self.inbox.put(event)
        else:
            metrics.LEFT_BEHIND.inc()

    def abandon(self, error: MooncakeError) -> None:
        """Have the iterator raise ``error`` as soon as it is asked for the next token."""
        self._abandoned = error
        self.inbox.put(events.BusChanged(self._bus_lost is None))

    # -- waiting ---------------------------------------------------------------------------------------

    async def _next(self) -> events.Event | None:
        """The next event, or None when something is due."""
        if self._abandoned:
            raise self._abandoned
        if self.inbox or await self.inbox.wait(self._due()):
            return self.inbox.take()
        self._on_time()
        return None

    def _due(self) -> float:
        if self._bus_lost is not None:
            return self._bus_lost + self._mesh.settings.bus_patience_s
        if self._place_at is not None:
            return self._place_at
        return min(self.stream.ask_at(), self._stall_at())

    def _on_time(self) -> None:
        now = self._loop.time()
        if self._bus_lost is not None:
            if now >= self._bus_lost + self._mesh.settings.bus_patience_s:
                raise self._bus_stayed_away()
            return
        self._place_if_due()
        if self.effort and now >= self._stall_at():
            self._left(self.attempts.stalled(self.effort.attempt.number))
        elif self.effort:
            self._ask_since(self.effort, now)

    def _bus_stayed_away(self) -> MooncakeError:
        why = "the bus did not come back in time"
        return AttemptFailed(why) if self.stream.started else BusDown(why, retry_after_ms=1000)

    def _stall_at(self) -> float:
        """No token until then means that something is lost which nobody noticed."""
        if self.effort is None:
            return float("inf")
        patience = self._mesh.settings.stall_s
        if self.effort.first is None:
            patience = max(patience, FIRST_TOKEN_FACTOR * self.effort.placement.decision.ttft)
        return self.stream.progress + patience

    def _ask_since(self, effort: Effort, now: float) -> None:
        """Rule: since. Decode answers from index 0; before it has drawn anything only prefill may know the first."""
        index = self.stream.question(now)
        if index is not None:
            for part in effort.attempt.parts.values():
                if part.accepted and part.needed:
                    effort.spawn(self._since(effort, part.ref, index))

    async def _since(self, effort: Effort, ref: Ref, index: int) -> None:
        """That prefill has handed over and forgotten it is no news; of decode it is."""
        for event in await self._mesh.teller.since(ref, effort.letters.since(ref, index, BACKLOG)):
            if isinstance(event, events.Arrived):
                self.arrived(event)
            elif ref == effort.placement.decode:
                self.inbox.put(event)

    # -- what happened ---------------------------------------------------------------------------------

    def _take(self, event: events.Event | None) -> list[Token]:
        match event:
            case events.Arrived():
                return self._arrived(event)
            case events.Took():
                self._took(event)
            case events.Refusal():
                self._left(self.attempts.refused(event.attempt, event.side, event.error))
            case events.NotHeld():
                self._left(self.attempts.unknown(event.attempt, event.sender))
            case events.GivenUp():
                self._left(self.attempts.gone(event.attempt, event.sender, event.error))
            case events.Died():
                self._left(self.attempts.died(event.ref))
            case events.BusChanged():
                self._bus_changed(event.up)
            case None:
                pass
        return []

    def _took(self, event: events.Took) -> None:
        effort = self.effort
        if effort is None or effort.attempt.number != event.attempt:
            return
        ref = effort.attempt.parts[event.side].ref
        if self.attempts.accepted(event.attempt, event.side):
            self._mesh.lists.accept(ref, (self.generation.id, event.attempt))

    def settle(self, ref: Ref) -> None:
        """A load report of an instance that covers this attempt was taken in."""
        if self.effort and self.effort.attempt.side_of(ref) is Side.PREFILL:
            self.effort.placement.booking.settle_prefill()
        elif self.effort and self.effort.attempt.side_of(ref) is Side.DECODE:
            self.effort.placement.booking.settle_decode()

    def _arrived(self, event: events.Arrived) -> list[Token]:
        effort, now = self.effort, self._loop.time()
        side = self.attempts.token_from(event.attempt, event.sender)
        if effort is None or side is None:
            metrics.STALE.inc()
            return []
        ready = self.stream.receive(event.attempt, event.output, event.usage, now)
        if side not in effort.drew:
            self._drew(effort, side)
        if ready and effort.first is None:
            self._first_token(effort, event.usage, now)
        effort.delivered(len(ready), event.at)
        return ready

    def _drew(self, effort: Effort, side: Side) -> None:
        """The first token of one side: it has surely accepted; that of decode releases prefill."""
        effort.drew.add(side)
        id = (self.generation.id, effort.attempt.number)
        self._mesh.lists.accept(effort.attempt.parts[side].ref, id)
        if side is Side.DECODE:
            self._mesh.lists.remove(effort.placement.prefill, id, complete=True)

    def _first_token(self, effort: Effort, usage: Usage | None, now: float) -> None:
        effort.first = now
        effort.span.add_event("first token")
        self._place_until, self._backoff = None, BACKOFF
        effort.placement.booking.prefilled(now)
        if self.generation.siblings:
            self.generation.siblings.home = effort.placement.prefill
        self._mesh.counts.served[effort.placement.prefill.id] += 1
        if effort.attempt.number == 1:
            self._mesh.gatekeeper.first_token(effort.placement.decision.ttft, now - effort.started)
        metrics.first_token(effort.placement.decision.ttft, now - effort.started, effort.placement.ask.tokens, usage)
        if usage:
            tokens, seconds = effort.placement.ask.tokens, usage.prefill_ms / 1000
            self._mesh.ledger.prefills.observe(effort.placement.prefill.id, tokens, usage.cached_tokens, seconds)

    def _bus_changed(self, up: bool) -> None:
        """Running streams wait for the bus, then ask for what they missed."""
        if up:
            self._bus_lost = None
            self.stream.ask_now(self._loop.time())
        elif self._bus_lost is None:
            self._bus_lost = self._loop.time()

    # -- attempts --------------------------------------------------------------------------------------

    def _place_if_due(self) -> None:
        now = self._loop.time()
        if self._place_at is None or now < self._place_at:
            return
        todo, wanted = self._work(now), self._objectives
        kept = self._mesh.gatekeeper.kept(now, wanted.ttft, self.generation.ticket) if wanted else Kept()
        placed = self._mesh.placer.place(
            self.generation, len(todo.tokens), todo.keys, todo.drawn, self.attempts.avoid, wanted, now, kept
        )
        if isinstance(placed, Rejection):
            self._unplaced(placed, now)
        else:
            self._begin(todo, placed, now)

    def _out_of_patience(self) -> bool:
        return self._place_until is not None and self._loop.time() >= self._place_until

    def _work(self, now: float) -> Work:
        outputs = self.stream.resume(self.attempts.number + 1, now)
        namespace = self._mesh.roster.namespace
        return work(self.generation, outputs, namespace.block_size if namespace else 1)

    def _unplaced(self, rejection: Rejection, now: float) -> None:
        """A new request is refused. One that was accepted before asks those it avoided again, slower and slower, until
        its first token comes or its patience ends."""
        if self._objectives is not None:
            raise self._mesh.gatekeeper.refuse(now, self.generation.ticket, rejection, self._objectives)
        if self._place_until is None:
            settings = self._mesh.settings
            patience = settings.stream_patience_s if self.stream.started else settings.placement_patience_s
            self._place_until = now + patience
        if self._out_of_patience():
            raise self._failed(rejected(rejection))
        self.attempts.forgive()
        self._place_at = now + self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _begin(self, todo: Work, placement: Placement, now: float) -> None:
        mesh = self._mesh
        if self._objectives is not None:
            mesh.gatekeeper.accepted(now, self.generation)
        self._place_at = self._objectives = None
        attempt = self.attempts.begin(placement.prefill, placement.decode)
        letters = Letters(mesh.me, todo, placement, attempt, mesh.lists.last)
        span = tracer().start_span("attempt", attributes=span_attributes(self.generation.id, attempt))
        self.effort = effort = Effort(attempt, placement, letters, span, now)
        for side, part in attempt.parts.items():
            mesh.lists.add(part.ref, (self.generation.id, attempt.number))
            effort.spawn(self._ask(effort, side, part.ref))
        mesh.counts.accepted += attempt.number == 1
        metrics.PLACED.labels("fetch" if placement.decision.fetch_blocks else "own").inc()
        if todo.drawn:
            mesh.counts.migrated += 1
            metrics.MIGRATIONS.inc()

    async def _ask(self, effort: Effort, side: Side, ref: Ref) -> None:
        write = effort.letters.submit if side is Side.PREFILL else effort.letters.admit
        settings = self._mesh.settings
        slo = (self.generation.slo_ttft_ms or settings.slo_ttft_ms) / 1000
        by = due(slo, effort.placement.decision.alone, settings.queue_overtake)

        def make() -> Any:
            age = max(self._loop.time() - self.generation.arrived, 0.0)
            return write(age, by - age)

        event = await self._mesh.teller.ask(side, ref, make)
        if isinstance(event, events.Took) and event.load:
            self._mesh.reported(ref.id, event.load, self._loop.time())
            self.settle(ref)
        self.inbox.put(event)

    def _left(self, left: Left | None) -> None:
        """An attempt ended; choose again, unless there is nothing to gain by it."""
        if left is None:
            return
        self._release(left.reason)
        logger.info("attempt left", request=self.generation.id, attempt=left.attempt.number, reason=left.reason)
        if left.fatal and left.error:
            raise left.error
        self._failure = left.error or AttemptFailed(f"attempt {left.attempt.number} ended: {left.reason}")
        if self.attempts.exhausted or self._out_of_patience():
            raise self._failed()
        self._mesh.counts.retried += 1
        self._mesh.counts.overcommitted += left.reason in NO_ROOM and not self.stream.started
        metrics.RETRIES.labels(metrics.reason(left.reason)).inc()
        self._place_at = self._loop.time()
        self._place_if_due()

    def _failed(self, obstacle: MooncakeError | None = None) -> MooncakeError:
        """What a request that cannot go on fails with. ``obstacle``: why no instance was to be had at last; before the
        first token that is the answer, since the client may come again."""
        if not self.stream.started and isinstance(self._failure, DoesNotFit):
            return self._failure
        if not self.stream.started and isinstance(self._failure, NoRoom | PoolFull):
            return Contended("no_room: every instance refused", field="no_room", retry_after_ms=1000)
        if not self.stream.started and obstacle is not None:
            return obstacle
        why = f": {self._failure.message}" if self._failure else ""
        return AttemptFailed(f"gave up after {self.attempts.number} attempts{why}")

    # -- the end ---------------------------------------------------------------------------------------

    def _release(self, reason: str) -> None:
        """Leave the live attempt: both instances are told, and it is listed no longer (rule: cancel)."""
        effort, self.effort = self.effort, None
        if effort is None:
            return
        for part in effort.attempt.parts.values():
            self._mesh.lists.remove(part.ref, (self.generation.id, effort.attempt.number), complete=False)
            self._mesh.spawn(self._mesh.teller.send(part.ref, effort.letters.cancel(part.ref, reason)))
        effort.end(reason)

    def _finish(self) -> None:
        """All tokens are here: the instance that drew the last may forget them, the other one has nothing to do."""
        effort, self.effort = self.effort, None
        attempt = self.attempts.finish()
        if effort is None or attempt is None:
            return
        by_decode = not attempt.parts[Side.PREFILL].needed
        for side, part in attempt.parts.items():
            drew = (side is Side.DECODE) == by_decode
            self._mesh.lists.remove(part.ref, (self.generation.id, attempt.number), complete=drew)
            if not drew and part.needed:
                self._mesh.spawn(self._mesh.teller.send(part.ref, effort.letters.cancel(part.ref, "finished")))
        if by_decode:
            self._mesh.counts.served[effort.placement.decode.id] += 1
            self._learn(effort)
        effort.end()

    def _learn(self, effort: Effort) -> None:
        """How its tokens came, against what was predicted."""
        decision, seen = effort.placement.decision, metrics.last_token(effort.placement.decision, effort.gaps)
        if seen is not None:
            self._mesh.ledger.decodes.tail.observe(jitter(seen, decision.step, effort.gaps), self._loop.time())

    def _close(self) -> None:
        """Whatever the reason, nothing of it stays."""
        self.attempts.finish()
        self._release("closed")
        self.inbox.close()


def objectives(mesh: Mesh, generation: Generation) -> Objectives:
    settings = mesh.settings
    return Objectives(
        ttft=(generation.slo_ttft_ms or settings.slo_ttft_ms) / 1000,
        tbt=(generation.slo_tbt_ms or settings.slo_tbt_ms) / 1000,
        held=settings.slo_tbt_ms / 1000,
    )


def span_attributes(request: str, attempt: Attempt) -> dict[str, str | int]:
    return {
        "mooncake.request": request,
        "mooncake.attempt": attempt.number,
        "mooncake.prefill": attempt.parts[Side.PREFILL].ref.id,
        "mooncake.decode": attempt.parts[Side.DECODE].ref.id,
    }
