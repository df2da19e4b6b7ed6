"""The gateway's side of attempts: which one is live, what ends it, whom the next one avoids. Pure.

After the checked model of the control plane (attempts). The names of its rules stand where they are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from shared.errors import MooncakeError
from shared.messages import Ref


class Side(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass
class Part:
    """One instance's share of an attempt. ``needed``: its death ends the attempt (prefill: until the first token of
    decode)."""

    ref: Ref
    accepted: bool = False
    needed: bool = True


@dataclass
class Attempt:
    number: int
    parts: dict[Side, Part]

    def side_of(self, ref: Ref) -> Side | None:
        for side, part in self.parts.items():
            if part.ref == ref:
                return side
        return None


@dataclass(frozen=True)
class Left:
    """An attempt that ended without the request's end; it is never gone back to. ``counts``: against the bound.
    ``error``: what the request fails with if this was the last attempt, or at once if ``fatal``."""

    attempt: Attempt
    reason: str
    counts: bool = True
    fatal: bool = False
    error: MooncakeError | None = None


FATAL = frozenset({"invalid_input", "context_length_exceeded"})
"""Another instance would say the same."""

PLANNED = frozenset({"draining", "stale_incarnation", "no_room"})
"""Nobody's fault: these do not count against the request's attempts. (No room after it ran: the youngest gave way.)"""

MOST_PLANNED = 10
"""Bound on all attempts, as a multiple of those that may fail."""


@dataclass
class Attempts:
    """At most one attempt is live. Numbers only grow, so a message of a left attempt finds nothing here."""

    most: int
    live: Attempt | None = None
    number: int = 0
    failures: int = 0
    avoid: set[Ref] = field(default_factory=set)
    over: bool = False

    @property
    def exhausted(self) -> bool:
        return self.failures >= self.most or self.number >= MOST_PLANNED * self.most

    def begin(self, prefill: Ref, decode: Ref) -> Attempt:
        if self.live or self.over:
            raise RuntimeError("an attempt is live, or the request is over")
        self.number += 1
        self.live = Attempt(self.number, {Side.PREFILL: Part(prefill), Side.DECODE: Part(decode)})
        return self.live

    def current(self, number: int) -> Attempt | None:
        """The live attempt if it has this number (rule: stale_attempt)."""
        return self.live if self.live and self.live.number == number else None

    def accepted(self, number: int, side: Side) -> bool:
        """True when this is news: it may be listed as accepted from now on (rule: list_accepted)."""
        attempt = self.current(number)
        if attempt is None or attempt.parts[side].accepted:
            return False
        attempt.parts[side].accepted = True
        return True

    def refused(self, number: int, side: Side, error: MooncakeError) -> Left | None:
        """One refusal ends the whole attempt (rule: both_or_none)."""
        attempt = self.current(number)
        if attempt is None:
            return None
        self.avoid.add(attempt.parts[side].ref)
        return self._leave(error.code, counts=error.code not in PLANNED, fatal=error.code in FATAL, error=error)

    def unknown(self, number: int, ref: Ref) -> Left | None:
        """An instance that had accepted it neither holds nor finished it (rule: unknown)."""
        attempt = self.current(number)
        side = attempt.side_of(ref) if attempt else None
        if attempt is None or side is None or not attempt.parts[side].accepted or not attempt.parts[side].needed:
            return None
        return self._leave("unknown")

    def died(self, ref: Ref) -> Left | None:
        """An instance died, or came back as another incarnation (rule: seen_dead)."""
        side = self.live.side_of(ref) if self.live else None
        if self.live is None or side is None or not self.live.parts[side].needed:
            return None
        self.avoid.add(ref)
        return self._leave("died")

    def gone(self, number: int, ref: Ref, error: MooncakeError) -> Left | None:
        """An instance gave it up. Where it names the other one (``field`` "decode": prefill was refused a landing,
        "prefill": decode waits for it in vain), that one is avoided, and itself, which keeps what it has, is not."""
        attempt = self.current(number)
        side = attempt.side_of(ref) if attempt else None
        if attempt is None or side is None or not attempt.parts[side].needed:
            return None
        blamed = {named.value: named for named in Side}.get(error.field, side)
        self.avoid.add(attempt.parts[blamed].ref)
        return self._leave(error.code, counts=error.code not in PLANNED, fatal=error.code in FATAL, error=error)

    def stalled(self, number: int) -> Left | None:
        """No token for too long although both instances live."""
        attempt = self.current(number)
        if attempt is None:
            return None
        self.avoid.update(part.ref for part in attempt.parts.values() if part.needed)
        return self._leave("stalled")

    def token_from(self, number: int, ref: Ref) -> Side | None:
        """A token is proof of acceptance; one of decode releases prefill. None: not from the live attempt."""
        attempt = self.current(number)
        side = attempt.side_of(ref) if attempt else None
        if attempt is None or side is None:
            return None
        attempt.parts[side].accepted = True
        if side is Side.DECODE:
            attempt.parts[Side.PREFILL].needed = False
        return side

    def finish(self) -> Attempt | None:
        """The request is over; returns the attempt that was live."""
        attempt, self.live, self.over = self.live, None, True
        return attempt

    def forgive(self) -> None:
        """Nobody else is left: those avoided may be asked again."""
        self.avoid.clear()

    def _leave(self, reason: str, counts: bool = True, fatal: bool = False, error: MooncakeError | None = None) -> Left:
        attempt, self.live = self.live, None
        assert attempt is not None
        self.failures += counts
        return Left(attempt, reason, counts, fatal, error)
