"""One live attempt as a run holds it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

from services.conductor.dispatch.asking import Letters
from services.conductor.dispatch.attempts import Attempt, Side
from services.conductor.dispatch.placing import Placement


class Effort:
    """Its booking, its letters, its tasks and its span; all end with it. ``first``: when its first token came.
    ``drew``: sides that a token came from. ``gaps``: seconds between its tokens."""

    def __init__(self, attempt: Attempt, placement: Placement, letters: Letters, span: Span, now: float) -> None:
        self.attempt = attempt
        self.placement = placement
        self.letters = letters
        self.span = span
        self.started = now
        self.first: float | None = None
        self.drew: set[Side] = set()
        self.gaps = array("f")
        self._last: float | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        with trace.use_span(self.span, end_on_exit=False):
            task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def delivered(self, tokens: int, now: float) -> None:
        """So many tokens are on their way to the client; those of one moment have no time between them."""
        if not tokens:
            return
        if self._last is not None:
            self.gaps.append(now - self._last)
        self.gaps.extend([0.0] * (tokens - 1))
        self._last = now

    def end(self, reason: str = "") -> None:
        """Idempotent. Messages to instances are the run's."""
        for task in self.tasks:
            task.cancel()
        self.placement.booking.end()
        if reason:
            self.span.set_status(StatusCode.ERROR, reason)
        self.span.end()
