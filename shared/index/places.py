"""Where a key is: in a run, or loose (its parent is not known), or nowhere.

Places in runs are in a table of fingerprints: who asks compares the key with the run's. The newest wait until they are
many, for the table takes many at once; until then their bytes are searched. Loose keys are in 256 dicts, so that none
grows for long.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from shared.blocks import KEY
from shared.index.runs import SHIFT, keys_of
from shared.index.table import Numbers, Table

MOST_SHARED = 1 << 16
MOST_WAITING = 1 << 11
ENOUGH = 1 << 7
"""Keys that need not wait for more when there is a moment."""

FEW = 16
"""So many at most are removed one by one: the table takes some twenty calls of numpy for any number of them."""


class Places:
    """Key -> place >= 0 (run id and position), or ``~holders`` < 0 for a loose key (bitmap of columns)."""

    def __init__(self) -> None:
        self.table = Table()
        self._waiting = bytearray()  # chains, one after the other
        self._starts: list[int] = []  # of each chain there, in keys
        self._firsts: list[int] = []  # place of its first key
        self._runs: set[int] = set()  # ids
        self.dicts: list[dict[bytes, int]] = [{} for _ in range(256)]
        self.loose = 0
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return self.placed + self.loose

    @property
    def placed(self) -> int:
        """Keys in runs."""
        return len(self._waiting) // KEY + len(self.table)

    # -- in runs --------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """-1: not in a run."""
        if self._waiting:
            place = self._find_waiting(key)
            if place >= 0:
                return place
        return self.table.find(key)

    def _find_waiting(self, key: bytes) -> int:
        at = self._waiting.find(key)
        while at % KEY and at > 0:
            at = self._waiting.find(key, at + 1)
        if at < 0:
            return -1
        chain = bisect_right(self._starts, at // KEY) - 1
        return self._firsts[chain] + at // KEY - self._starts[chain]

    def find_all(self, chain: bytes) -> Numbers:
        """The same for many."""
        places = self.table.find_all(chain)
        if self._waiting:
            keys = keys_of(chain)
            for at in (places < 0).nonzero()[0].tolist():
                places[at] = self._find_waiting(keys[at])
        return places

    def put(self, chain: bytes, first: int) -> None:
        """Consecutive places from ``first`` on, in one run, for keys that have none."""
        n = len(chain) // KEY
        if n >= MOST_WAITING:
            self.table.put(chain, np.arange(first, first + n))
            return
        self._starts.append(len(self._waiting) // KEY)
        self._firsts.append(first)
        self._runs.add(first >> SHIFT)
        self._waiting += chain
        self.flush(MOST_WAITING)

    def flush(self, least: int = ENOUGH) -> None:
        """Into the table, if ``least`` keys or more are waiting."""
        n = len(self._waiting) // KEY
        if n < least:
            return
        starts = np.array(self._starts)
        sizes = np.array([*self._starts[1:], n]) - starts
        self.table.put(bytes(self._waiting), np.arange(n) + np.repeat(np.array(self._firsts) - starts, sizes))
        self._waiting.clear()
        self._starts.clear()
        self._firsts.clear()
        self._runs.clear()

    def remove(self, chain: bytes, first: int) -> None:
        """Undoes :meth:`put`. Keys that are at other places are left alone."""
        if first >> SHIFT in self._runs:
            self.flush(1)
        n = len(chain) // KEY
        if n > FEW:
            self.table.remove(chain, np.arange(first, first + n))
        else:
            for place, key in enumerate(keys_of(chain), first):
                self.table.discard(key, place)

    # -- loose ----------------------------------------------------------------------------------------------

    def holders(self, key: bytes) -> int:
        """Columns that hold ``key``, where it is loose; 0 otherwise."""
        return ~self.dicts[key[0]].get(key, -1)

    def put_loose(self, key: bytes, holders: int) -> None:
        """Make ``key`` loose with these holders, or forget it when there are none. It has no place in a run."""
        places = self.dicts[key[0]]
        had = key in places
        if holders:
            places[key] = self.share(~holders)
            self.loose += not had
        elif had:
            del places[key]
            self.loose -= 1

    def share(self, value: int) -> int:
        """One int object for equal sets of holders."""
        if len(self._shared) > MOST_SHARED:
            self._shared.clear()
        return self._shared.setdefault(value, value)
