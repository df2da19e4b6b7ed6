"""How long a disk that failed is left alone. Pure."""

from __future__ import annotations

FIRST = 2.0
MOST = 60.0
"""Seconds of the first rest, and of any: each is twice as long as the one before."""


class Rest:
    """Times are the caller's, in seconds. Nothing rests until :meth:`fail`."""

    def __init__(self) -> None:
        self._pause = FIRST
        self._until: float | None = None

    def fail(self, now: float) -> float:
        """Rest from now on. Returns for how long."""
        pause, self._pause = self._pause, min(2 * self._pause, MOST)
        self._until = now + pause
        return pause

    def over(self, now: float) -> bool:
        """True once after each rest: it is the caller's turn to try."""
        if self._until is None or now < self._until:
            return False
        self._until = None
        return True

    def well(self) -> None:
        """It works again: the next rest is a first one."""
        self._pause = FIRST
