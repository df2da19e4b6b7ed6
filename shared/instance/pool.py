"""The node's pool as the service itself sees it: for the rare copy of a block from slot to slot."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from shared.engines.base import PoolMap


class PoolView:
    """A mapping of the pool, of this process's own. Valid as long as it is kept, also after the agent has died."""

    def __init__(self, pool: PoolMap) -> None:
        self._pool = pool
        fd = os.open(pool.path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, pool.offset + pool.slots * pool.stride)
        finally:
            os.close(fd)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    def copy(self, source: int, target: int) -> None:
        """Copy slot ``source`` to slot ``target``, which the caller holds alone. Holds no GIL."""
        size = self._pool.geometry.slot_bytes
        start, end = self._at(source), self._at(target)
        np.copyto(self._bytes[end : end + size], self._bytes[start : start + size])

    def _at(self, slot: int) -> int:
        return self._pool.offset + slot * self._pool.stride
