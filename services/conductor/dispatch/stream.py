"""The token stream of a request: in order, exactly once, asked for again where it is silent or has a gap. Pure.

After the checked model of the token stream. The names of its rules stand where they are kept.
"""

from __future__ import annotations

import numpy as np

from services.conductor.generation import Token
from shared.blocks import Tokens
from shared.messages import Output, Usage

GAP_GRACE = 0.05
"""Seconds a gap may last before it is asked about: the first token comes from prefill, the next from decode."""

ASK_AGAIN = 0.5


class TokenStream:
    """``silence``: seconds without a token after which the instance is asked. Times are any monotonic seconds.

    ``complete``: the token with the finish reason was delivered, and so were all before it. ``progress``: when a token
    was last delivered, or the attempt began.
    """

    def __init__(self, silence: float, now: float) -> None:
        self.complete = False
        self.progress = now
        self._silence = silence
        self._attempt = 0
        self._delivered: list[int] = []
        self._waiting: dict[int, tuple[Output, Usage | None]] = {}
        self._heard, self._asked = now, float("-inf")
        self._gap_since: float | None = None

    @property
    def started(self) -> bool:
        return bool(self._delivered)

    def resume(self, attempt: int, now: float) -> Tokens:
        """A new attempt begins. Returns the outputs to resume with: those delivered, never those that only waited
        (rule: resume_delivered)."""
        self._attempt = attempt
        self._heard = self.progress = now
        self._asked = float("-inf")
        self._gap_since = None
        self._waiting.clear()
        return np.array(self._delivered, dtype=np.uint32)

    def receive(self, attempt: int, output: Output, usage: Usage | None, now: float) -> list[Token]:
        """What can be delivered now, in order."""
        if attempt != self._attempt or self.complete:
            return []  # rule: stale_attempt
        self._heard = now
        if output.index < len(self._delivered):
            return []  # rule: dedup
        self._waiting[output.index] = (output, usage)
        ready = self._in_order()
        if ready:
            self.progress = now
        if not self._waiting or self.complete:
            self._gap_since = None
        elif ready or self._gap_since is None:
            self._gap_since = now
        return ready

    def _in_order(self) -> list[Token]:
        """Rules: in_order, and finish_count: the reason travels in the last entry, which waits for all before it."""
        ready = []
        while not self.complete and (entry := self._waiting.pop(len(self._delivered), None)):
            output, usage = entry
            self._delivered.append(output.token)
            self.complete = bool(output.finish)
            ready.append(Token(output, usage if output.index == 0 else None))
        return ready

    def ask_at(self) -> float:
        """When the instance should be asked next, if nothing comes until then."""
        quiet = max(self._heard, self._asked) + self._silence
        if self._gap_since is None:
            return quiet
        return min(quiet, max(self._gap_since + GAP_GRACE, self._asked + ASK_AGAIN))

    def ask_now(self, now: float) -> None:
        """The bus was away: whatever came meanwhile is lost, so ask without waiting for silence."""
        self._heard = self._asked = float("-inf")
        self.progress = now

    def question(self, now: float) -> int | None:
        """Index from which on to ask; None until it is time (rule: since)."""
        if self.complete or now < self.ask_at():
            return None
        self._heard = max(self._heard, now - self._silence)
        self._asked = now
        return len(self._delivered)
