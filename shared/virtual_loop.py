"""An asyncio event loop of virtual time: waiting costs nothing, the clock jumps to the next timer.

For code without real sockets (MemoryBus, pure simulations). ``loop.time()`` starts at 0; ``run`` mirrors asyncio.run.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of blocking for the next timer, moves the clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("virtual time stands still: no timer is set and nothing is ready")
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time. Raises RuntimeError when everything waits for nothing (a deadlock)."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
