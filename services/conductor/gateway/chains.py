"""Keys of prompts that begin like prompts before them: what was hashed lately is compared, not hashed again."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import numpy as np

from shared.blocks import KEY, Tokens, chain_keys

MOST_BYTES = 64 << 20
"""Of runs that are remembered: their token ids, their keys, and what a run takes besides."""

RUN = 600
"""Bytes that a run takes besides, about."""

PEEK = 64
"""Bytes of token ids by which a run is found; the rest is compared."""

Name = tuple[int, bytes, bytes]


class Chains:
    """Runs of blocks by what they follow and begin with: (token ids, keys). From any thread.

    ``keys`` answers what :func:`shared.blocks.chain_keys` would. Tenants share nothing: roots hold their salt.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.held = 0
        self._most = most_bytes
        self._runs: OrderedDict[Name, tuple[bytes, bytes]] = OrderedDict()
        self._lock = Lock()

    def keys(self, root: bytes, tokens: Tokens, block_size: int) -> bytes:
        step, count = 4 * block_size, len(tokens) // block_size
        if not count:
            return b""
        ids = np.ascontiguousarray(tokens[: count * block_size], dtype="<u4").data.cast("B")
        known = self._known(root, ids, step)
        at = len(known) // KEY
        if at == count:
            return known
        parent = known[-KEY:] or root
        rest = chain_keys(parent, tokens[at * block_size :], block_size)
        self._remember(_name(parent, ids, at * step, step), bytes(ids[at * step :]), rest)
        return known + rest

    def _known(self, root: bytes, ids: memoryview, step: int) -> bytes:
        found, parent, at = b"", root, 0
        with self._lock:
            while at < len(ids):
                name = _name(parent, ids, at, step)
                run = self._runs.get(name)
                same = _common(run[0], ids[at:], step) if run else 0
                if run is None or not same:
                    break
                self._runs.move_to_end(name)
                found += run[1][: same * KEY]
                parent, at = found[-KEY:], at + same * step
        return found

    def _remember(self, name: Name, ids: bytes, keys: bytes) -> None:
        with self._lock:
            before = self._runs.pop(name, None)
            self._runs[name] = ids, keys
            self.held += _size(ids, keys) - (_size(*before) if before else 0)
            while self.held > self._most:
                _, oldest = self._runs.popitem(last=False)
                self.held -= _size(*oldest)


def _size(ids: bytes, keys: bytes) -> int:
    return len(ids) + len(keys) + RUN


def _name(parent: bytes, ids: memoryview, at: int, step: int) -> Name:
    return step, parent, bytes(ids[at : at + min(PEEK, step)])


def _common(run: bytes, ids: memoryview, step: int) -> int:
    """Whole blocks in which the two begin alike."""
    high = min(len(run), len(ids)) // step
    if run.startswith(ids[: high * step]):
        return high
    low = 0
    while high - low > 1:
        mid = (low + high) // 2
        if run.startswith(ids[low * step : mid * step], low * step):
            low = mid
        else:
            high = mid
    return low
