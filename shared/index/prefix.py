"""Who holds how long a prefix of a chain of blocks: the conductor's view of the index, pure.

Chained keys form a forest of runs (a fork points at its parent run and position, so runs never split). Per column (an
agent) and run one int says what is held. Matching finds the last known key; the vector kept for its run answers, or the
forks are walked up to make one. Keys whose parent is not known are loose until a match shows their chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import compress, repeat
from typing import NamedTuple

import numpy as np

from shared.blocks import KEY
from shared.index.forest import ROOT, Forest, Step
from shared.index.runs import Run, bitmap, keys_of, last, ones, packed, prefix
from shared.index.vectors import Lengths, Vectors

COLUMNS = 16
UNORDERED = 8
"""Keys to remove from which on it pays to sort them by their places."""


@lru_cache(1 << 12)
def _number(n: int) -> Lengths:
    """``n`` as numpy likes it: it takes longer to make an array of an int than to compare sixteen with it."""
    return np.array(n, dtype=np.int32)


class Effect(NamedTuple):
    """Of the keys given, those that changed nothing and those that changed only their tier."""

    same: list[bytes]
    moved: list[bytes]


_WHOLE = Effect([], [])


class PrefixIndex:
    """Columns are small integers: ``add_column`` gives one out, ``drop`` takes it back. Not thread-safe."""

    def __init__(self) -> None:
        self.width = COLUMNS
        self.forest = Forest(self._settle, self._linked)
        self.places = self.forest.places
        self.held: list[dict[Run, int]] = [{} for _ in range(COLUMNS)]
        self.slow: list[dict[Run, int]] = [{} for _ in range(COLUMNS)]  # of those held, what is not in DRAM: bitmap
        self.loose_slow: dict[bytes, int] = {}
        self._free_columns = list(range(COLUMNS - 1, -1, -1))
        self._vectors = Vectors(self.held)
        self._dropping: list[int] = []
        self._sweep = 0  # next first byte where dropped columns are taken out of loose keys
        self._trims: list[Run] = []

    # -- columns --------------------------------------------------------------------------------------------

    def add_column(self) -> int:
        if not self._free_columns:
            self._free_columns = list(range(2 * self.width - 1, self.width - 1, -1))
            self.held += [{} for _ in range(self.width)]
            self.slow += [{} for _ in range(self.width)]
            self.width *= 2
            self._vectors.clear()
        return self._free_columns.pop()

    def drop(self, column: int) -> None:
        """Nobody asks for ``column`` any more. Its entries go bit by bit in :meth:`tidy`, then it is free again."""
        self._dropping.append(column)
        self._sweep = 0

    def tidy(self, most: int = 256) -> bool:
        """Forget about ``most`` runs of dropped columns, or one first byte of loose keys. True while there is more."""
        if not self._dropping:
            return self._trim_some(most)
        for column in self._dropping:
            held = self.held[column]
            for _ in range(min(most, len(held))):
                run = next(reversed(held))
                self._hold(column, run, 0)
                self._trims.append(run)
                most -= 1
            if held:
                return True
        if self.places.loose and self._sweep < 256:
            self._sweep_loose(self._sweep)
            self._sweep += 1
            return True
        self._free_columns += self._dropping
        self._dropping = []
        return self._trim_some(most)

    def _trim_some(self, most: int) -> bool:
        for _ in range(min(most, len(self._trims))):
            self._trim(self._trims.pop())
        return bool(self._trims)

    def _sweep_loose(self, byte: int) -> None:
        keep = ~sum(1 << column for column in self._dropping)
        for key, place in list(self.places.dicts[byte].items()):
            if place < 0 and ~place & ~keep:
                self.places.put_loose(key, ~place & keep)
                self._mark_loose_slow(key, self.loose_slow.get(key, 0) & keep)

    # -- changes --------------------------------------------------------------------------------------------

    def store(self, column: int, chain: bytes, parent: bytes | None, tier: int = 0) -> Effect:
        """``column`` holds the blocks of ``chain``, consecutive after ``parent`` (None: in no known order)."""
        effect = _WHOLE
        held = self.held[column]
        while chain:
            run, at, n = self.forest.span(chain)
            if run is None and parent is not None:
                run, at, n = self.forest.grow(chain, parent)
            if run is None:
                effect = self._store_loose(column, chain[:KEY], tier, effect)
            else:
                if run.doubt and parent == ROOT and at == 0 and run.parent is None:
                    self.forest.believe(run)  # it begins a chain indeed
                v = held.get(run, 0)
                if 0 <= v <= at and not tier:
                    self._hold(column, run, at + n if v == at else packed(bitmap(v) | (1 << n) - 1 << at))
                elif v < at + n or tier or self.slow[column]:
                    effect = self._store_again(column, run, at, n, tier, effect)
                else:  # all held already, and nothing of this column is anywhere but in DRAM
                    effect = Effect([*effect.same, *keys_of(chain[: n * KEY])], effect.moved)
            if n * KEY == len(chain):
                break
            parent = None if parent is None else chain[n * KEY - KEY : n * KEY]
            chain = chain[n * KEY :]
        return effect

    def store_loose(self, column: int, keys: bytes, tier: int) -> None:
        """The same for many keys of one first byte, each once and in no order, without saying which changed
        something."""
        places, some = self.places, keys_of(keys)
        here, alone = places.dicts[keys[0]], places.share(~(1 << column))
        placed = places.find_all(keys) >= 0 if places.placed else None
        if tier or not here.keys().isdisjoint(some) or (placed is not None and np.count_nonzero(placed)):
            elsewhere = repeat(False) if placed is None else placed.tolist()
            known = [key for key, there in zip(some, elsewhere, strict=False) if tier or there or key in here]
            some = tuple(dict.fromkeys(some).keys() - known)
            for key in known:
                self.store(column, key, None, tier)
        here.update(dict.fromkeys(some, alone))
        places.loose += len(some)

    def connect(self, chain: bytes, parent: bytes | None) -> None:
        """The keys of ``chain`` follow each other after ``parent``: give those that are loose their places."""
        touched: dict[Run, None] = {}
        while chain:
            run, _, n = self.forest.span(chain)
            if run is None and parent is not None and self.places.holders(chain[:KEY]):
                self.forest.grow(chain[:KEY], parent)
            elif run is not None:
                touched[run] = None
            parent = chain[n * KEY - KEY : n * KEY]
            chain = chain[n * KEY :]
        for run in touched:
            self._trim(run)

    def _store_again(self, column: int, run: Run, at: int, n: int, tier: int, effect: Effect) -> Effect:
        """Some of these blocks may be held already, at one tier or the other."""
        asked = (1 << n) - 1 << at
        had, slow = bitmap(self.held[column].get(run, 0)), self.slow[column].get(run, 0)
        there = had & asked
        wrong = there & (slow ^ (-1 if tier else 0))
        self._hold(column, run, packed(had | asked))
        self._mark_slow(column, run, slow | asked if tier else slow & ~asked)
        same, moved = map(run.key, ones(there & ~wrong)), map(run.key, ones(wrong))
        return Effect([*effect.same, *same], [*effect.moved, *moved]) if there else effect

    def _store_loose(self, column: int, key: bytes, tier: int, effect: Effect) -> Effect:
        holders, slow, bit = self.places.holders(key), self.loose_slow.get(key, 0), 1 << column
        self.places.put_loose(key, holders | bit)
        self._mark_loose_slow(key, slow | bit if tier else slow & ~bit)
        if not holders & bit:
            return effect
        if bool(slow & bit) == bool(tier):
            return Effect([*effect.same, key], effect.moved)
        return Effect(effect.same, [*effect.moved, key])

    def remove(self, column: int, chain: bytes) -> Effect:
        """``column`` does not hold these blocks any more (``moved`` of the answer: those that were not in DRAM)."""
        effect = _WHOLE
        held, trims = self.held[column], list[Run]()
        whole = len(chain)
        while chain:
            run, at, n = self.forest.span(chain)
            if len(chain) == whole > max(n, UNORDERED) * KEY:  # in no order, or an agent's, which drops leaves first
                chain, whole = self._by_place(chain), 0
                continue
            if run is None:
                effect = self._remove_loose(column, chain[:KEY], effect)
            else:
                v = held.get(run, 0)
                if at + n == v and run not in self.slow[column]:
                    self._hold(column, run, at)
                else:
                    effect = self._remove_some(column, run, at, n, effect)
                trims.append(run)
            if n * KEY == len(chain):
                break
            chain = chain[n * KEY :]
        for run in dict.fromkeys(trims):
            self._trim(run)
        return effect

    def _by_place(self, chain: bytes) -> bytes:
        order = self.places.find_all(chain).argsort(kind="stable")
        ordered: bytes = np.frombuffer(chain, dtype=f"V{KEY}")[order].tobytes()
        return ordered

    def _remove_some(self, column: int, run: Run, at: int, n: int, effect: Effect) -> Effect:
        asked = (1 << n) - 1 << at
        had, slow = bitmap(self.held[column].get(run, 0)), self.slow[column].get(run, 0) & asked
        if had & asked == asked and not slow:
            self._hold(column, run, packed(had ^ asked))
            return effect
        self._mark_slow(column, run, self.slow[column].get(run, 0) & ~asked)
        self._hold(column, run, packed(had & ~asked))
        same, moved = map(run.key, ones(asked & ~had)), map(run.key, ones(slow))
        return Effect([*effect.same, *same], [*effect.moved, *moved])

    def _remove_loose(self, column: int, key: bytes, effect: Effect) -> Effect:
        holders, slow, bit = self.places.holders(key), self.loose_slow.get(key, 0), 1 << column
        if not holders & bit:
            return Effect([*effect.same, key], effect.moved)
        self.places.put_loose(key, holders & ~bit)
        self._mark_loose_slow(key, slow & ~bit)
        return Effect(effect.same, [*effect.moved, key]) if slow & bit else effect

    # -- questions ------------------------------------------------------------------------------------------

    def tier(self, column: int, key: bytes) -> int:
        """0 in DRAM, 1 not in DRAM, -1 not held."""
        found = self.forest.find(key)
        if found is None:
            held, slow = self.places.holders(key) >> column & 1, self.loose_slow.get(key, 0) >> column & 1
        else:
            run, position = found
            held = bitmap(self.held[column].get(run, 0)) >> position & 1
            slow = self.slow[column].get(run, 0) >> position & 1
        return slow if held else -1

    def match(self, chain: bytes) -> Lengths:
        """Per column the number of blocks of the prefix of ``chain`` that it holds."""
        found, end = self.forest.find(chain[-KEY:]), len(chain) // KEY
        if found is None:
            end, found = self.forest.locate(chain)
        if found is not None and found[0].vector is not None and found[0].base + found[1] + 1 == end:
            shorter: Lengths = np.minimum(found[0].vector, _number(end))
            return shorter
        path = self.forest.up(chain, end, found)
        if not path:
            return np.zeros(self.width, np.int32)
        return self._match_path(path)

    def _match_path(self, path: list[Step]) -> Lengths:
        run, base, cut = path[0]
        first, offset, _ = path[-1]
        lengths: Lengths
        if offset == 0 and first.parent is None:
            lengths = np.minimum(self._vectors.along(path) if run.vector is None else run.vector, base + cut)
            return lengths
        lengths = np.zeros(self.width, np.int32)
        for run, base, cut in reversed(path):
            self._match_few(lengths, run, base, cut)
        return lengths

    def _match_few(self, lengths: Lengths, run: Run, base: int, cut: int) -> None:
        for column in ones(run.who):
            v = self.held[column][run]
            if base < 0:  # the chain begins inside of the run
                lengths[column] = prefix(packed((bitmap(v) & (1 << cut) - 1) >> -base))
            elif lengths[column] == base:
                lengths[column] = base + min(prefix(v), cut)

    def inventory(self, column: int) -> Iterator[list[bytes]]:
        """All keys that ``column`` holds, some at a time; changes meanwhile may be missed."""
        for run, v in list(self.held[column].items()):
            keys = keys_of(bytes(run.keys))
            yield list(keys[:v] if v >= 0 else compress(keys, (~v >> at & 1 for at in range(len(keys)))))
        for places in self.places.dicts:
            yield [key for key, place in places.items() if ~place >> column & 1]

    @property
    def has_slow(self) -> bool:
        """Anything is held that is not in DRAM."""
        return bool(self.loose_slow) or any(self.slow)

    def fast(self, chain: bytes, lengths: Lengths) -> Lengths:
        """Of what :meth:`match` found, the leading blocks that are in DRAM."""
        if not self.has_slow:
            return lengths
        out = lengths.copy()
        for run, base, cut in self.forest.path(chain):
            for column in ones(run.who):
                slow = (self.slow[column].get(run, 0) & (1 << cut) - 1) >> max(0, -base)
                if slow:
                    first = max(base, 0) + (slow & -slow).bit_length() - 1
                    out[column] = min(out[column], first)
        return out

    # -- what is held ---------------------------------------------------------------------------------------

    def _settle(self, run: Run, position: int, key: bytes, holders: int) -> None:
        """A loose key gets its place: who holds it now holds that block of the run."""
        self.places.put_loose(key, 0)
        slow = self.loose_slow.pop(key, 0)
        for column in ones(holders):
            self._hold(column, run, packed(bitmap(self.held[column].get(run, 0)) | 1 << position))
            if slow >> column & 1:
                self._mark_slow(column, run, self.slow[column].get(run, 0) | 1 << position)

    def _hold(self, column: int, run: Run, v: int) -> None:
        if v:
            self.held[column][run] = v
            run.who |= 1 << column
        elif self.held[column].pop(run, 0):
            run.who &= ~(1 << column)
            self.slow[column].pop(run, None)
        if run.vector is not None:
            self._vectors.changed(run, column)

    def _mark_slow(self, column: int, run: Run, mask: int) -> None:
        if mask:
            self.slow[column][run] = mask
        else:
            self.slow[column].pop(run, None)

    def _mark_loose_slow(self, key: bytes, mask: int) -> None:
        if mask:
            self.loose_slow[key] = mask
        else:
            self.loose_slow.pop(key, None)

    def _linked(self, run: Run) -> None:
        if run.vector is not None:
            self._vectors.drop(run)

    def _trim(self, run: Run | None) -> None:
        """Forget keys at the end of a run that nobody holds and nothing forks from."""
        while run is not None and not run.forks and self.forest.exists(run):
            top, whole = 0, len(run)
            for column in ones(run.who):
                top = max(top, last(self.held[column][run]))
                if top == whole:
                    return
            self.forest.cut(run, top)
            if top:
                return
            self._vectors.drop(run)
            run = self.forest.forget(run)
