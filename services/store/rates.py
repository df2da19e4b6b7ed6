"""How fast bytes move between this node and others, for whoever predicts transfers. Pure."""

from __future__ import annotations

HALF = 64 << 20
"""After this many bytes an older measurement counts for half."""

LEAST = 256 << 10
"""Smaller transfers say more about latency than about the link."""


class Rate:
    """Bytes per second, weighted by bytes; 0.0 until something was measured."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, moved: int, seconds: float) -> None:
        if moved < LEAST or seconds <= 0:
            return
        keep = 0.5 ** (moved / HALF) if self.value else 0.0
        self.value = keep * self.value + (1 - keep) * moved / seconds
