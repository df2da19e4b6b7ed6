"""Pages of a slab are made shortly before its slots are first used: else the first copy into each pays for them."""

from __future__ import annotations

import ctypes
from concurrent.futures import Executor, Future

from services.store.memory import SlabMemory

AHEAD = 128 << 20
"""Bytes that are ready beyond the highest slot used so far: a few prompts, not an idle node's whole pool."""
STEP = 16 << 20
"""Bytes made at a time: some 15 ms on a thread, without the GIL."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_madvise = ctypes.CDLL(None, use_errno=True).madvise


class Prefault:
    """Works on a thread of ``threads`` whenever slots beyond the highest so far are handed out. Never waited for."""

    def __init__(self, memory: SlabMemory, threads: Executor) -> None:
        self._memory = memory
        self._threads = threads
        self._wanted = self._done = 0
        self._running: Future[None] | None = None
        self.reached(0)

    @property
    def done(self) -> int:
        """Bytes from the slab's start whose pages were made."""
        return self._done

    def reached(self, slots: int) -> None:
        """The first ``slots`` slots are, or were, in use."""
        self._wanted = max(self._wanted, min(slots * self._memory.stride + AHEAD, self._memory.size))
        some = min(STEP, self._memory.size - self._done)  # to wake the thread for each slot costs more than the slot
        if 0 < some <= self._wanted - self._done and (self._running is None or self._running.done()):
            self._running = self._threads.submit(self._run)

    def _run(self) -> None:
        while self._done < self._wanted:
            area = self._memory.bytes[self._done : min(self._done + STEP, self._wanted)]  # keeps the mapping meanwhile
            if not len(area) or _madvise(
                ctypes.c_void_p(area.ctypes.data), ctypes.c_size_t(len(area)), _MADV_POPULATE_WRITE
            ):
                self._done = self._memory.size  # closed, or a kernel that does not know how: pages come when touched
                return
            self._done += len(area)
