"""The one thread on which an instance's engine computes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from shared.tasks import settle

T = TypeVar("T")


class Compute(Protocol):
    """Where engine steps run, one after the other."""

    @property
    def progress(self) -> int:
        """Steps done so far."""

    @property
    def busy(self) -> bool:
        """True while a step runs or waits: ``progress`` should be moving."""

    async def run(self, step: Callable[[], T]) -> T:
        """The result of ``step()``. A cancelled caller is kept until the step has returned, since the engine uses the
        caller's slots until then; a step that has not begun is taken back."""

    def close(self) -> None:
        """Let the step in progress return; take no more."""


class InlineCompute:
    """The twin without a thread: steps run on the event loop. For tests in virtual time."""

    progress = 0
    busy = False

    async def run(self, step: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        self.progress += 1
        return step()

    def close(self) -> None:
        """Nothing to let go of."""


class ComputeThread:
    """A thread that does nothing else. ``busy`` without ``progress`` shows a hung engine."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting = 0
        self.progress = 0

    @property
    def busy(self) -> bool:
        return self._waiting > 0

    async def run(self, step: Callable[[], T]) -> T:
        work: Future[T] = self._pool.submit(step)
        self._waiting += 1
        future = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not work.cancel():
                await settle(future)
            with contextlib.suppress(BaseException):
                future.exception()
            raise
        finally:
            self._waiting -= 1
            self.progress += 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
