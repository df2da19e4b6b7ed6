"""What one turn of the event loop may spend on a transfer that is carried there. Pure, but for the waiting itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

TURN = 0.005
"""Seconds after which nothing is begun or waited for any more. What was begun is one system call that does not block:
it copies 4 MiB at most, in a millisecond or two."""


class Poll(Protocol):
    def poll(self, timeout: float | None = None, /) -> object:
        """Milliseconds; what is ready, nothing at the end."""


class Turn:
    """Begins when it is made."""

    def __init__(self, seconds: float = TURN, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def wait(self, ready: Poll, most: float = float("inf")) -> bool:
        """Until something is ready, ``most`` milliseconds, and never past the turn: a fraction of a millisecond, which
        ``poll`` would round up, is not waited. False: the turn, or the wait, is over."""
        left = (self._end - self._clock()) * 1000
        return left > 0 and bool(ready.poll(int(min(most, left))))
