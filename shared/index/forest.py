"""The forest of runs: where chains of keys lie and how they hang together, whoever holds them."""

from __future__ import annotations

from collections.abc import Callable

from shared.blocks import KEY
from shared.index.places import Places
from shared.index.runs import MOST_RUN, SHIFT, Run, keys_of

ROOT = b""  # parent of a first block


Step = tuple[Run, int, int]
"""(run, base, cut) of a chain's path: its blocks from ``base`` on are the first ``cut`` of ``run``. base < 0: the chain
begins with block ``-base`` of the run."""


class Forest:
    """``settle(run, position, key, holders)`` is called when a loose key is about to get its place."""

    def __init__(self, settle: Callable[[Run, int, bytes, int], None]) -> None:
        self.places = Places()
        self._settle = settle
        self._runs: list[Run | None] = []
        self._free: list[int] = []

    def run(self, place: int) -> Run:
        run = self._runs[place >> SHIFT]
        assert run is not None  # a key has a place only in a run that exists
        return run

    def find(self, key: bytes) -> tuple[Run, int] | None:
        at = self.places.dicts[key[0]].get(key) if key else None
        return None if at is None or at < 0 else (self.run(at), at & MOST_RUN - 1)

    def span(self, chain: bytes) -> tuple[Run | None, int, int]:
        """(run, position, n): the first n >= 1 keys of ``chain`` lie there in a row; None: the first has no place."""
        place = self.places.dicts[chain[0]].get(chain[:KEY], -1)
        if place < 0:
            return None, 0, 1
        run, at = self.run(place), place & MOST_RUN - 1
        size = len(chain)
        have = run.keys[at * KEY : at * KEY + size]
        if have == chain:
            return run, at, size // KEY
        low, high = 1, min(len(have), size) // KEY + 1
        while high - low > 1:
            mid = (low + high) // 2
            if have[: mid * KEY] == chain[: mid * KEY]:
                low = mid
            else:
                high = mid
        return run, at, low

    def path(self, chain: bytes) -> list[Step]:
        """The runs of the longest known prefix of ``chain``, last first."""
        end = self._known(chain, len(chain) // KEY)
        while end:
            key = chain[end * KEY - KEY : end * KEY]
            place = self.places.dicts[key[0]][key]
            if place & MOST_RUN - 1 == end - 1:  # by far the most common: all of it in one run
                return [(self.run(place), 0, end)]
            steps, end = self._walk(chain, end)
            if steps:
                return steps
        return []

    def _walk(self, chain: bytes, end: int) -> tuple[list[Step], int]:
        """The path up from block ``end - 1``; when it does not reach the chain's start, the end to try instead."""
        found = self.find(chain[end * KEY - KEY : end * KEY])
        steps: list[Step] = []
        index = end - 1
        while found is not None:
            run, position = found
            base = index - position
            steps.append((run, base, position + 1))
            if base <= 0:
                return steps, end
            if run.parent is None and not self._link(run, chain, base):
                return [], self._known(chain, base)
            assert run.parent is not None
            found, index = (run.parent, run.at - 1), base - 1
        return [], 0

    def _link(self, run: Run, chain: bytes, base: int) -> bool:
        """``run`` begins with block ``base`` of ``chain``: so its parent is the block before, if that is known."""
        before = chain[base * KEY - KEY : base * KEY]
        found = self.find(before)
        if found is None and self.places.holders(before):
            self.grow(before, ROOT)
            found = self.find(before)
        if found is None or found[0].follows(run):
            return False
        run.parent, run.at = found[0], found[1] + 1
        run.parent.forks += 1
        return True

    def _known(self, chain: bytes, most: int) -> int:
        """How many keys from the start are known, where the known ones are the first; else the end of some such row."""
        dicts, low, high, mid = self.places.dicts, -1, most, 0
        while high - low > 1:  # nothing known is common, and so is everything known
            at = mid * KEY
            if dicts[chain[at]].get(chain[at : at + KEY], -1) >= 0:
                mid, low = (high - 1 if mid == 0 else (mid + high) >> 1), mid
            else:
                mid, high = (low + mid) >> 1, mid
        return high if high == most else self._place_loose(chain, high, most)

    def _place_loose(self, chain: bytes, known: int, most: int) -> int:
        """Block ``known`` has no place: give it one if it is loose, and what follows. Returns the end of the known."""
        while known < most:
            key = chain[known * KEY : known * KEY + KEY]
            at = self.places.get(key)
            if at is None:
                break
            if at < 0:
                self.grow(key, chain[known * KEY - KEY : known * KEY] if known else ROOT)
            known += 1
        return known

    def grow(self, chain: bytes, parent: bytes) -> tuple[Run, int, int]:
        """Give the first keys of ``chain``, up to one that has a place, their places after ``parent``. The first has
        none yet. Returns (run, position, n) as :meth:`span` would then."""
        if parent and self.places.holders(parent):
            self.grow(parent, ROOT)
        run, position = self.find(parent) or (None, -1)
        first: tuple[Run, int, int] | None = None
        while True:
            start = len(run.keys) // KEY if run is not None else MOST_RUN
            if run is None or position + 1 < start or start == MOST_RUN:
                run, start = self._new_run(run, position + 1), 0
            part = chain[: (MOST_RUN - start) * KEY]
            placed = self._place(run, start, part)
            first = first or (run, start, placed)
            position, chain = start + placed - 1, chain[placed * KEY :]
            if not run.keys:
                self.forget(run)
            if not chain or placed * KEY < len(part):
                return first

    def _place(self, run: Run, start: int, chain: bytes) -> int:
        """Append keys to ``run``; returns how many came before one that has a place."""
        dicts, first = self.places.dicts, run.id << SHIFT | start
        for place, key in enumerate(keys_of(chain), first):
            there = dicts[key[0]].setdefault(key, place)
            if there != place:
                if there >= 0:
                    run.keys += chain[: (place - first) * KEY]
                    return place - first
                self._settle(run, place & MOST_RUN - 1, key, ~there)
                dicts[key[0]][key] = place
        run.keys += chain
        return len(chain) // KEY

    def _new_run(self, parent: Run | None, at: int) -> Run:
        id = self._free.pop() if self._free else len(self._runs)
        run = Run(id, parent, at)
        if parent is not None:
            parent.forks += 1
        self._runs[id : id + 1] = [run]
        return run

    def cut(self, run: Run, top: int) -> None:
        """Forget the keys of ``run`` from ``top`` on, which nobody holds."""
        dicts = self.places.dicts
        for key in keys_of(bytes(run.keys[top * KEY :])):
            del dicts[key[0]][key]
        del run.keys[top * KEY :]

    def exists(self, run: Run) -> bool:
        return self._runs[run.id] is run

    def forget(self, run: Run) -> Run | None:
        """``run`` is empty. Returns its parent, which may have become a leaf."""
        self._runs[run.id] = None
        self._free.append(run.id)
        if run.parent is not None:
            run.parent.forks -= 1
        return run.parent
