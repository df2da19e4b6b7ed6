"""Where a key is: in a run, or loose (its parent is not known), or nowhere.

Places in runs are in a table of fingerprints: who asks compares the key with the run's. New ones wait in a dict until
they are many, for the table takes many at once. Loose keys are in 256 dicts, so that none grows for long.
"""

from __future__ import annotations

from itertools import compress

import numpy as np

from shared.blocks import KEY
from shared.index.runs import keys_of
from shared.index.table import Numbers, Table

MOST_SHARED = 1 << 16
MOST_RECENT = 1 << 12
MANY = 256
"""Keys from which on they go to the table at once."""

FEW = 8


class Places:
    """Key -> place >= 0 (run id and position), or ``~holders`` < 0 for a loose key (bitmap of columns)."""

    def __init__(self) -> None:
        self.table = Table()
        self.recent: dict[bytes, int] = {}
        self.dicts: list[dict[bytes, int]] = [{} for _ in range(256)]
        self.loose = 0
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.recent) + len(self.table) + self.loose

    # -- in runs --------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """-1: not in a run."""
        place = self.recent.get(key)
        return self.table.find(key) if place is None else place

    def find_all(self, chain: bytes) -> Numbers:
        """The same for many."""
        places = self.table.find_all(chain)
        if self.recent:
            for at, key in enumerate(keys_of(chain)):
                place = self.recent.get(key)
                if place is not None:
                    places[at] = place
        return places

    def put(self, chain: bytes, first: int) -> None:
        """Consecutive places from ``first`` on for keys that have none."""
        n = len(chain) // KEY
        if n >= MANY:
            self.table.put(chain, np.arange(first, first + n))
            return
        self.recent.update(zip(keys_of(chain), range(first, first + n), strict=True))
        if len(self.recent) >= MOST_RECENT:
            places = np.fromiter(self.recent.values(), np.int64, len(self.recent))
            self.table.put(b"".join(self.recent), places)
            self.recent.clear()

    def remove(self, chain: bytes, first: int) -> None:
        """Undoes :meth:`put`. Keys that are at other places are left alone."""
        keys, recent = keys_of(chain), self.recent
        older = [recent.get(key) != place for place, key in enumerate(keys, first)] if recent else [True] * len(keys)
        rest = list(compress(keys, older))
        if len(rest) < len(keys):
            for key, old in zip(keys, older, strict=True):
                if not old:
                    del recent[key]
        places = list(compress(range(first, first + len(keys)), older))
        if len(rest) > FEW:
            self.table.remove(b"".join(rest), np.array(places))
        else:
            for key, place in zip(rest, places, strict=True):
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
