"""The forest of runs: where chains of keys lie and how they hang together, whoever holds them.

Whoever names a chain names what comes before it, so where a key has its place the one before has one too: of a new
chain whose first key has none no other needs to be looked for. Runs that cannot know their parent are *doubtful*.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.blocks import KEY
from shared.index.places import Places
from shared.index.runs import MOST_RUN, SHIFT, Run, keys_of

ROOT = b""  # parent of a first block
UNKNOWN = b"?"  # there is a parent, perhaps, and nobody has said which

FEW_DOUBTS = 8
"""Each looked for by itself. (One that is found where no key begins costs time and nothing else.)"""

Step = tuple[Run, int, int]
"""(run, base, cut) of a chain's path: its blocks from ``base`` on are the first ``cut`` of ``run``. base < 0: the chain
begins with block ``-base`` of the run."""


class Forest:
    """``settle(run, position, key, holders)`` is called when a loose key has got its place, ``linked(run)`` when the
    parent of a run becomes known."""

    def __init__(self, settle: Callable[[Run, int, bytes, int], None], linked: Callable[[Run], None]) -> None:
        self.places = Places()
        self._settle = settle
        self._linked = linked
        self._runs: list[Run | None] = []
        self._free: list[int] = []
        self._doubtful: dict[bytes, int] = {}  # how many runs have this doubt

    def find(self, key: bytes) -> tuple[Run, int] | None:
        place = self.places.find(key) if len(key) == KEY else -1
        if place < 0:
            return None
        run, at = self._runs[place >> SHIFT], place & MOST_RUN - 1
        return (run, at) if run is not None and run.keys.startswith(key, at * KEY) else None

    def span(self, chain: bytes) -> tuple[Run | None, int, int]:
        """(run, position, n): the first n >= 1 keys of ``chain`` lie there in a row; None: the first has no place."""
        found = self.find(chain[:KEY])
        if found is None:
            return None, 0, 1
        return *found, found[0].common(found[1], chain)

    def path(self, chain: bytes) -> list[Step]:
        """The runs of the longest known prefix of ``chain``, last first."""
        return self.up(chain, *self.locate(chain))

    def up(self, chain: bytes, end: int, found: tuple[Run, int] | None) -> list[Step]:
        """The same from where :meth:`locate` has been."""
        while end:
            steps, end, found = self._walk(chain, end, found)
            if steps:
                return steps
        return []

    def _walk(
        self, chain: bytes, end: int, found: tuple[Run, int] | None
    ) -> tuple[list[Step], int, tuple[Run, int] | None]:
        """The path up from block ``end - 1``, which is at ``found``; when it does not reach the chain's start, where to
        try instead."""
        steps: list[Step] = []
        index = end - 1
        while found is not None:
            run, position = found
            base = index - position
            steps.append((run, base, position + 1))
            if base <= 0:
                return steps, end, found
            if run.parent is None and not self._link(run, chain, base):
                return [], *self.locate(chain[: base * KEY])
            assert run.parent is not None
            found, index = (run.parent, run.at - 1), base - 1
        return [], 0, None

    def _link(self, run: Run, chain: bytes, base: int) -> bool:
        """``run`` begins with block ``base`` of ``chain``: so its parent is the block before, if that is known."""
        before = chain[base * KEY - KEY : base * KEY]
        found = self.find(before)
        if found is None and self.places.holders(before):
            self.grow(before, UNKNOWN)
            found = self.find(before)
        if found is None or found[0].follows(run):
            return False
        self._linked(run)
        self.believe(run)
        run.parent, run.at = found[0], found[1] + 1
        run.parent.forks += 1
        return True

    def locate(self, chain: bytes) -> tuple[int, tuple[Run, int] | None]:
        """(keys from the start that are known, or all if the last is known; where the last of them is). Loose ones get
        their places."""
        most, end = len(chain) // KEY, 0
        last = self.find(chain[-KEY:])
        if last is not None:
            return most, last
        while end < most:
            found = self.find(chain[end * KEY : end * KEY + KEY])
            if found is not None:
                run, at = found
                n = run.common(at, chain, end)
            elif loose := self._loose(chain, end):
                before = chain[end * KEY - KEY : end * KEY] if end else UNKNOWN
                run, at, n = self.grow(chain[end * KEY : (end + loose) * KEY], before)
            else:
                break
            end, last = end + n, (run, at + n - 1)
        return end, last

    def _loose(self, chain: bytes, begin: int) -> int:
        """How many keys from ``begin`` on are loose."""
        end, size = begin, len(chain) // KEY
        if self.places.loose:
            while end < size and self.places.holders(chain[end * KEY : end * KEY + KEY]):
                end += 1
        return end - begin

    def grow(self, chain: bytes, parent: bytes) -> tuple[Run, int, int]:
        """Give the first keys of ``chain``, up to one that has a place, their places after ``parent``. The first has
        none yet. Returns (run, position, n) as :meth:`span` would then."""
        if len(parent) == KEY and self.places.holders(parent):
            self.grow(parent, UNKNOWN)
        run, position = self.find(parent) or (None, -1)
        first: tuple[Run, int, int] | None = None
        while True:
            start = len(run.keys) // KEY if run is not None else MOST_RUN
            if run is None:
                run, start = self._new_run(None, 0), 0
                self._doubt(run, chain[:KEY] if parent == UNKNOWN else parent)
            elif position + 1 < start or start == MOST_RUN:
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
        places = self.places
        if self._doubtful and self._crosses(chain):
            there = (places.find_all(chain) >= 0).nonzero()[0]
            chain = chain[: int(there[0]) * KEY] if len(there) else chain
        run.keys += chain
        places.put(chain, run.id << SHIFT | start)
        if places.loose:
            for position, key in enumerate(keys_of(chain), start):
                if holders := places.holders(key):
                    self._settle(run, position, key, holders)
        return len(chain) // KEY

    def _crosses(self, chain: bytes) -> bool:
        """``chain`` may lead into a doubtful run."""
        if len(self._doubtful) <= FEW_DOUBTS:
            return any(key in chain for key in self._doubtful)
        return not self._doubtful.keys().isdisjoint(keys_of(chain))

    def _doubt(self, run: Run, key: bytes) -> None:
        run.doubt = key
        if key:
            self._doubtful[key] = self._doubtful.get(key, 0) + 1

    def believe(self, run: Run) -> None:
        """What comes before ``run`` is known now, or it will be gone."""
        if run.doubt:
            self._doubtful[run.doubt] -= 1
            if not self._doubtful[run.doubt]:
                del self._doubtful[run.doubt]
            run.doubt = b""

    def _new_run(self, parent: Run | None, at: int) -> Run:
        id = self._free.pop() if self._free else len(self._runs)
        run = Run(id, parent, at)
        if parent is not None:
            parent.forks += 1
        self._runs[id : id + 1] = [run]
        return run

    def cut(self, run: Run, top: int) -> None:
        """Forget the keys of ``run`` from ``top`` on, which nobody holds."""
        self.places.remove(bytes(run.keys[top * KEY :]), run.id << SHIFT | top)
        del run.keys[top * KEY :]

    def exists(self, run: Run) -> bool:
        return self._runs[run.id] is run

    def forget(self, run: Run) -> Run | None:
        """``run`` is empty. Returns its parent, which may have become a leaf."""
        self.believe(run)
        self._runs[run.id] = None
        self._free.append(run.id)
        if run.parent is not None:
            run.parent.forks -= 1
        return run.parent
