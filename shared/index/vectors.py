"""Lengths of prefixes by column, kept for runs that are asked for: one comparison then answers a match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.index.runs import Run, ones, prefix

MOST_VECTORS = 4096

Lengths = npt.NDArray[np.int32]


class Vectors:
    """``held``: by column what it holds of each run, the owner's. A run with a vector has them all the way up."""

    def __init__(self, held: Sequence[dict[Run, int]]) -> None:
        self._held = held
        self._runs: dict[Run, None] = {}

    def along(self, path: Sequence[tuple[Run, int, int]]) -> npt.NDArray[Any]:
        """The vector of a path's first run. It goes up, (run, blocks before it, ...), to where a chain begins."""
        for run, base, _ in reversed(path):
            if run.vector is None:
                self._make(run, base)
        vector = path[0][0].vector
        assert vector is not None
        while len(self._runs) > MOST_VECTORS:
            self.drop(next(iter(self._runs)))
        return vector

    def _make(self, run: Run, base: int) -> None:
        vector = np.zeros(len(self._held), np.int32)
        for column in ones(run.who):
            vector[column] = prefix(self._held[column][run])
        above = run.parent
        if above is not None and above.vector is not None:  # it has one, being made first
            before = np.minimum(above.vector, base)
            vector *= before == base  # only who holds all of the path so far
            vector += before
            above.kids = above.kids or set()
            above.kids.add(run)
            above.reach = max(above.reach, base)
        run.vector, run.base = vector, base
        self._runs[run] = None

    def changed(self, run: Run, column: int) -> None:
        """``run`` has a vector, and ``column`` holds something else of it."""
        todo = [run]
        while todo:
            run = todo.pop()
            vector, above = run.vector, run.parent
            assert vector is not None
            new = run.base + prefix(self._held[column].get(run, 0))
            if above is not None and above.vector is not None:
                before = int(above.vector[column])
                new = new if before >= run.base else before
            old, vector[column] = int(vector[column]), new
            if run.kids and min(old, new) < run.reach and old != new:
                todo += [kid for kid in run.kids if min(old, kid.base) != min(new, kid.base)]

    def drop(self, run: Run) -> None:
        """And all that rest on it."""
        if run.parent is not None and run.parent.kids:
            run.parent.kids.discard(run)
        todo = [run]
        while todo:
            run = todo.pop()
            todo += run.kids or ()
            run.vector, run.kids, run.reach = None, None, 0
            self._runs.pop(run, None)

    def clear(self) -> None:
        while self._runs:
            self.drop(next(iter(self._runs)))
