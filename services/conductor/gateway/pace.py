"""When the tokens of an answer came: time to the first, time between them. Pure; times are monotonic seconds."""

from __future__ import annotations

import heapq
import math
from array import array

WORST = 0.1


class Pace:
    """Of one choice. ``arrived`` None: it waited for another one, so that its first token tells nothing. ``ttft``:
    seconds from arrival to the first token, None before it."""

    def __init__(self, arrived: float | None) -> None:
        self._last = arrived
        self._first = True
        self._intervals = array("f")
        self.ttft: float | None = None

    def mark(self, now: float) -> None:
        if not self._first and self._last is not None:
            self._intervals.append(now - self._last)
        elif self._last is not None:
            self.ttft = now - self._last
        self._first = False
        self._last = now

    def tbt(self) -> float | None:
        """Mean of the worst tenth of the intervals (at least one of them), None without any."""
        if not self._intervals:
            return None
        count = math.ceil(len(self._intervals) * WORST)
        return sum(heapq.nlargest(count, self._intervals)) / count
