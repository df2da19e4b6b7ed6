"""A pool of this process alone, in anonymous memory: for engines that run without a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shared.blocks import Geometry
from shared.engines.base import PoolMap


@contextmanager
def anonymous_pool(geometry: Geometry, slots: int) -> Iterator[PoolMap]:
    """Zeroed pool whose pages exist once they are touched. Closing lets go of the descriptor; a mapping made before
    stays valid as long as its engine keeps it."""
    fd = os.memfd_create("mooncake-private-pool", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, slots * geometry.slot_bytes)
        yield PoolMap(f"/proc/self/fd/{fd}", 0, geometry.slot_bytes, slots, geometry)
    finally:
        os.close(fd)
