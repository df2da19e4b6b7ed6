"""When the tokens of an answer came: time to the first, time between them. Pure; times are monotonic seconds."""

from __future__ import annotations

import heapq
import math
from array import array

WORST = 0.1


class Pace:
    """Of one choice. ``ttft``: seconds from arrival to the first token, None before it."""

    def __init__(self, arrived: float) -> None:
        self._last = arrived
        self._intervals = array("f")
        self.ttft: float | None = None

    def mark(self, now: float) -> None:
        if self.ttft is None:
            self.ttft = now - self._last
        else:
            self._intervals.append(now - self._last)
        self._last = now

    def tbt(self) -> float | None:
        """Mean of the worst tenth of the intervals (at least one of them), None without any."""
        if not self._intervals:
            return None
        count = math.ceil(len(self._intervals) * WORST)
        return sum(heapq.nlargest(count, self._intervals)) / count
