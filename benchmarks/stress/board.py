"""Counters and generations that all processes of a stress run share: a mapped file, so that a kill loses nothing."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import numpy as np

ROWS = 64


class Count(IntEnum):
    """``BYTES`` were read and checked."""

    OPS = 0
    BYTES = 1
    HITS = 2
    MISSES = 3
    ERRORS = 4
    MISMATCHES = 5


class Board:
    """``[ROWS, counters]``, a row of one process each, and ``[writers, keys]``: the last generation that each writer
    gave each key. Generation g is number g // writers of writer g % writers."""

    def __init__(self, path: Path, writers: int, keys: int) -> None:
        size = ROWS * len(Count) + writers * keys
        if not path.exists():
            path.write_bytes(bytes(8 * size))
        table = np.memmap(path, np.uint64, "r+", shape=(size,))
        self._counts = table[: ROWS * len(Count)].reshape(ROWS, len(Count))
        self._last = table[ROWS * len(Count) :].reshape(writers, keys)
        self._writers = writers

    def add(self, row: int, count: Count, amount: int = 1) -> None:
        self._counts[row, count] += np.uint64(amount)

    def of(self, row: int, count: Count) -> int:
        return int(self._counts[row, count])

    def total(self, count: Count) -> int:
        return int(self._counts[:, count].sum())

    def next_generation(self, writer: int, key: int) -> int:
        """Before anything of it is written."""
        self._last[writer, key] += np.uint64(1)
        return int(self._last[writer, key]) * self._writers + writer

    def issued(self, key: int, generation: int) -> bool:
        return 0 < generation // self._writers <= int(self._last[generation % self._writers, key])
