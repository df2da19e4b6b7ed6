"""How long to wait before a child that died is started again. Pure: times are passed in."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 0.2
FACTOR = 2.0
LIMIT = 15.0
HEALTHY = 30.0
LOOP = 4


@dataclass
class Backoff:
    """One per child. ``failures`` counts deaths in a row, each before :data:`HEALTHY` seconds of life."""

    failures: int = 0

    def died(self, lived: float) -> float:
        """Seconds to wait before the next start, after a life of ``lived`` seconds."""
        self.failures = 1 if lived >= HEALTHY else self.failures + 1
        return min(LIMIT, FIRST * FACTOR ** (self.failures - 1))

    @property
    def looping(self) -> bool:
        """It keeps dying young: starting it again will hardly help, and somebody should read its last words."""
        return self.failures >= LOOP
