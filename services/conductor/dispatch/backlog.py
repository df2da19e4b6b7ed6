"""Whether this conductor keeps up with its own work. Pure core, and the watch that feeds it."""

from __future__ import annotations

import asyncio

from shared.errors import Contended

PROBE = 0.1  # seconds between looks
LATE = 0.5
"""A look so much later than it was due is behind. Far below the three seconds after which instances miss the live list
and give up what they work on; far above what a long prompt or a busy machine costs in passing."""
IN_A_ROW = 3


class Backlog:
    """New work is refused while the last ``IN_A_ROW`` looks were behind: to begin it would delay what was accepted."""

    def __init__(self) -> None:
        self._late = 0.0
        self._row = 0

    def looked(self, late: float) -> None:
        """``late``: seconds by which the look missed its time."""
        self._late = late
        self._row = self._row + 1 if late >= LATE else 0

    def check(self) -> None:
        """Raises Contended."""
        if self._row >= IN_A_ROW:
            message = f"the conductor is {self._late:.1f} s behind with what it has accepted"
            raise Contended(message, field="backlog", retry_after_ms=1000 + int(2000 * self._late))

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PROBE
            await asyncio.sleep(PROBE)
            self.looked(max(0.0, loop.time() - due))
