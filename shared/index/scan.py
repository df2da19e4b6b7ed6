"""Reading a shard anew: what its hash holds, and making the mirror's copy equal to it, in slices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from shared.index.digest import State, rotated, xor_keys
from shared.index.prefix import PrefixIndex

PLACE = 9  # bytes: code, tier
SLICE = 400  # keys between two yields

_NOTHING = State()

Keys = tuple[set[bytes], set[bytes]]
"""In DRAM, elsewhere."""

Found = dict[int, Keys]
"""By first byte: a set of all keys would stall for long whenever it grows."""


class Scan:
    """``tip``: stream id from which to follow afterwards; ``taken``: sequences at that moment."""

    def __init__(self, tip: int, taken: dict[bytes, State]) -> None:
        self.tip = tip
        self.states: dict[bytes, State] = {}
        self._taken = taken
        self._found: dict[bytes, Found] = {}

    def add(self, flat: Sequence[bytes]) -> None:
        """Pages of HSCAN: keys may come twice, and those that change meanwhile in either state."""
        pages: dict[bytes, list[bytes]] = {}  # many keys have the same places
        for key, places in zip(flat[::2], flat[1::2], strict=True):
            pages.setdefault(places, []).append(key)
        for places, keys in pages.items():
            for at in range(0, len(places) - PLACE + 1, PLACE):
                found = self._found.setdefault(places[at : at + PLACE - 1], {})
                self._note(found, keys, places[at + PLACE - 1] != 0)

    @staticmethod
    def _note(found: Found, keys: Sequence[bytes], slow: bool) -> None:
        for key in keys:
            pair = found.get(key[0])
            if pair is None:
                pair = found[key[0]] = (set(), set())
            pair[slow].add(key)

    def count(self) -> Iterator[None]:
        """Fill ``states``: what was found, with the sequences that belong to it."""
        for code in self._taken.keys() | self._found.keys():
            size = xor = 0
            for fast, slow in self._found.get(code, {}).values():
                fast -= slow  # seen at both tiers: the stream will tell
                size += len(fast) + len(slow)
                for tier, keys in enumerate((fast, slow)):
                    for some in _slices(keys):
                        xor ^= rotated(xor_keys(b"".join(some)), tier)
                        yield
            self.states[code] = State(self._taken.get(code, _NOTHING).seq, size, xor)

    def merge(
        self,
        prefix: PrefixIndex,
        column: Callable[[bytes], int],
        states: Mapping[bytes, State],
        first_bytes: Iterable[int],
    ) -> Iterator[None]:
        """Bring ``prefix`` to what was found, after :meth:`count`. ``states``: what it holds of each code now.
        ``first_bytes``: those of the shard's keys."""
        differing = [
            code
            for code in self.states.keys() | states.keys()
            if states.get(code, _NOTHING)[1:] != self.states.get(code, _NOTHING)[1:]
        ]
        surplus = [code for code in differing if states.get(code, _NOTHING).size]
        bytes_here = frozenset(first_bytes)
        for code in surplus:
            yield from self._remove(prefix, column(code), self._found.get(code, {}), bytes_here)
        for byte in bytes_here:
            for code in differing:
                for tier, keys in enumerate(self._found.get(code, {}).pop(byte, ())):
                    for some in _slices(keys):
                        prefix.store_loose(column(code), some, tier)
                        yield

    def _remove(self, prefix: PrefixIndex, column: int, found: Found, first_bytes: Collection[int]) -> Iterator[None]:
        """What the column holds of this shard and should not."""
        for keys in prefix.inventory(column):
            for some in _slices(keys):
                mine = (key for key in some if key[0] in first_bytes)
                gone = [key for key in mine if not any(key in tier for tier in found.get(key[0], ()))]
                prefix.remove(column, b"".join(gone))
                yield


def _slices(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    rest = iter(keys)
    while some := list(islice(rest, SLICE)):
        yield some
