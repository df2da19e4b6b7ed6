"""Work that would hold up the event loop, in a few threads with a bounded queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.errors import Contended
from shared.telemetry import held_gauge

R = TypeVar("R")

SHORT = 64 * 1024  # bytes of a job that is never behind a longer one
START_RATE = 1e6  # bytes per second and thread, until it was measured
SMOOTHING = 0.1


class Offload:
    """``threads`` workers for short jobs, and as many for long ones, so that no short prompt waits for the seconds that
    a long one takes. At most ``jobs`` jobs of together ``bytes`` bytes are in it, more is refused."""

    def __init__(self, threads: int, jobs: int, bytes: int) -> None:
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="tokenize long")
        self._threads = threads
        self._limits = (jobs, bytes)
        self._jobs = 0
        self._bytes = 0
        self._rate = START_RATE
        self._gauge = held_gauge("tokenize_jobs")

    async def run(self, size: int, job: Callable[[], R]) -> R:
        """``job()`` in a thread. ``size``: bytes that it works on. Raises Contended when the queue is full.

        Cancelling the caller takes a job out of the queue; one that has started runs to its end.
        """
        self._admit(size)
        self._count(1, size)
        try:
            workers = self._short if size <= SHORT else self._long
            return await asyncio.get_running_loop().run_in_executor(workers, self._timed, size, job)
        finally:
            self._count(-1, -size)

    def close(self) -> None:
        for workers in (self._short, self._long):
            workers.shutdown(wait=False, cancel_futures=True)

    def _admit(self, size: int) -> None:
        """A job that is too big for the whole queue is taken when it is alone."""
        jobs, limit = self._limits
        if self._jobs and (self._jobs >= jobs or self._bytes + size > limit):
            wait = self._bytes / (self._rate * self._threads)
            raise Contended(
                "too many prompts wait to be tokenized", field="tokenizer", retry_after_ms=max(100, int(wait * 1000))
            )

    def _timed(self, size: int, job: Callable[[], R]) -> R:
        began = time.thread_time()
        result = job()
        took = time.thread_time() - began
        if took > 0 and size:
            self._rate += SMOOTHING * (size / took - self._rate)
        return result

    def _count(self, jobs: int, size: int) -> None:
        self._jobs += jobs
        self._bytes += size
        self._gauge.inc(jobs)
