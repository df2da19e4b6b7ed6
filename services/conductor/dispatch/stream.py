"""The token stream of a request: in order, exactly once, asked for again where it is silent or has a gap. Pure.

After the checked model of the token stream. The names of its rules stand where they are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.conductor.generation import Token
from shared.blocks import Tokens
from shared.messages import Output, Usage

GAP_GRACE = 0.05
"""Seconds a gap may last before it is asked about: the first token comes from prefill, the next from decode."""

ASK_AGAIN = 0.5


@dataclass
class Choice:
    """``delivered``: token ids handed to the client. ``waiting``: index -> what came too early."""

    delivered: list[int] = field(default_factory=list)
    waiting: dict[int, tuple[Output, Usage | None]] = field(default_factory=dict)
    finished: bool = False


class TokenStream:
    """``silence``: seconds without a token after which the instance is asked. Times are any monotonic seconds."""

    def __init__(self, choices: int, silence: float, now: float) -> None:
        self._choices = [Choice() for _ in range(choices)]
        self._silence = silence
        self._attempt = 0
        self._heard = now
        self._progress = now
        self._gap_since: float | None = None
        self._asked = now

    @property
    def complete(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def started(self) -> bool:
        return any(choice.delivered for choice in self._choices)

    @property
    def progress(self) -> float:
        """When a token was last delivered, or the attempt began."""
        return self._progress

    def delivered(self, choice: int = 0) -> Tokens:
        return np.array(self._choices[choice].delivered, dtype=np.uint32)

    def resume(self, attempt: int, now: float) -> Tokens:
        """A new attempt begins. Returns the outputs to resume with: those delivered, never those that only waited
        (rule: resume_delivered). Several choices are drawn again from their start; what was delivered is dropped."""
        self._attempt = attempt
        self._heard = self._progress = self._asked = now
        self._gap_since = None
        for choice in self._choices:
            choice.waiting.clear()
        return self.delivered() if len(self._choices) == 1 else np.empty(0, dtype=np.uint32)

    def receive(self, attempt: int, output: Output, usage: Usage | None, now: float) -> list[Token]:
        """What can be delivered now, in order."""
        if attempt != self._attempt or not 0 <= output.choice < len(self._choices):
            return []  # rule: stale_attempt
        self._heard = now
        choice = self._choices[output.choice]
        if output.index < len(choice.delivered) or choice.finished:
            return []  # rule: dedup
        choice.waiting[output.index] = (output, usage)
        ready = self._in_order(choice)
        if ready:
            self._progress = now
        self._note_gap(now)
        return ready

    def _in_order(self, choice: Choice) -> list[Token]:
        """Rules: in_order, and finish_count: the reason travels in the last entry, which waits for all before it."""
        ready = []
        while not choice.finished and (entry := choice.waiting.pop(len(choice.delivered), None)):
            output, usage = entry
            choice.delivered.append(output.token)
            choice.finished = bool(output.finish)
            ready.append(Token(output, usage))
        return ready

    def _note_gap(self, now: float) -> None:
        if not any(choice.waiting and not choice.finished for choice in self._choices):
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now

    def ask_at(self) -> float:
        """When the instance should be asked next, if nothing comes until then."""
        quiet = max(self._heard, self._asked) + self._silence
        if self._gap_since is None:
            return quiet
        return min(quiet, max(self._gap_since + GAP_GRACE, self._asked + ASK_AGAIN))

    def ask_now(self, now: float) -> None:
        """The bus was away: whatever came meanwhile is lost, so ask without waiting for silence."""
        self._heard = self._asked = float("-inf")
        self._progress = now

    def questions(self, now: float) -> list[tuple[int, int]]:
        """(choice, index) to ask for from there on; empty until it is time (rule: since)."""
        if now < self.ask_at():
            return []
        self._heard = max(self._heard, now - self._silence)
        self._asked = now
        return [(i, len(choice.delivered)) for i, choice in enumerate(self._choices) if not choice.finished]
