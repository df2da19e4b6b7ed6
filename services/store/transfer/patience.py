"""When it pays to wait for an answer where it was asked for, instead of leaving that to a thread. Pure."""

from __future__ import annotations

MOST = 1024


class Patience:
    """A wait in vain costs its whole length, so after one the next wait is left out, and twice as many after each
    further one in a row, up to ``MOST``. A peer that is far or slow costs next to nothing, one that was busy for once
    is waited for again soon."""

    def __init__(self) -> None:
        self._left_out = 0
        self._penalty = 0

    def willing(self) -> bool:
        """To be asked before each wait."""
        if self._left_out:
            self._left_out -= 1
            return False
        return True

    def waited(self, in_vain: bool) -> None:
        self._penalty = min(MOST, 2 * self._penalty or 1) if in_vain else 0
        self._left_out = self._penalty
