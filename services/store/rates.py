"""How fast bytes move between this node and others, for whoever predicts transfers. Pure."""

from __future__ import annotations

ASSUMED = 1e9
"""Bytes per second before anything was measured: what conductors assume of a link, too."""

HALF = 64 << 20
"""After this many bytes what was believed before counts for half."""

LEAST = 256 << 10
"""Smaller transfers say more about latency than about the link."""


class Rate:
    """Bytes per second: the mean time of a byte, weighted by bytes. One slow transfer, of a moment in which the machine
    had other things to do, does not make a slow link. 0.0 until something was measured."""

    def __init__(self) -> None:
        self._seconds = 1 / ASSUMED  # of a byte
        self._measured = False

    @property
    def value(self) -> float:
        return 1 / self._seconds if self._measured else 0.0

    def add(self, moved: int, seconds: float) -> None:
        if moved < LEAST or seconds <= 0:
            return
        keep = 0.5 ** (moved / HALF)
        self._seconds = keep * self._seconds + (1 - keep) * seconds / moved
        self._measured = True
