"""Reading a shard anew: what its hash holds, and making the mirror's copy equal to it, in slices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from shared.blocks import KEY
from shared.index.bins import Bins, apart
from shared.index.digest import State, rotated, xor_keys
from shared.index.prefix import PrefixIndex
from shared.index.runs import keys_of

PLACE = 9  # bytes: code, tier
SLICE = 1000  # keys between two yields

_NOTHING = State()


class Scan:
    """``tip``: stream id from which to follow afterwards; ``taken``: sequences at that moment."""

    def __init__(self, tip: int, taken: dict[bytes, State]) -> None:
        self.tip = tip
        self.states: dict[bytes, State] = {}
        self._taken = taken
        self._bins: dict[bytes, tuple[Bins, Bins]] = {}  # in DRAM, elsewhere
        self._found: dict[bytes, dict[int, tuple[bytes, bytes]]] = {}  # the same by first byte, each key once

    def add(self, page: Mapping[bytes, bytes]) -> None:
        """A page of HSCAN, key -> places. Keys may come twice, and those that change meanwhile in either state; what is
        no key is somebody else's, and passed over."""
        if any(len(key) != KEY for key in page):
            page = {key: places for key, places in page.items() if len(key) == KEY}
        groups: dict[bytes, list[bytes]] = {}  # many keys have the same places
        if len(set(page.values())) == 1:
            groups[next(iter(page.values()))] = list(page)
        else:
            for key, places in page.items():
                groups.setdefault(places, []).append(key)
        for places, keys in groups.items():
            together = b"".join(keys)
            for at in range(0, len(places) - PLACE + 1, PLACE):
                tiers = self._bins.setdefault(places[at : at + PLACE - 1], (Bins(), Bins()))
                tiers[places[at + PLACE - 1] != 0].add(together)

    def count(self) -> Iterator[None]:
        """Fill ``states``: what was found, with the sequences that belong to it."""
        for code in self._taken.keys() | self._bins.keys():
            size = xor = 0
            for byte, (fast, slow) in self._settled(code):
                self._found.setdefault(code, {})[byte] = fast, slow
                size += (len(fast) + len(slow)) // KEY
                xor ^= xor_keys(fast) ^ rotated(xor_keys(slow), 1)
                yield
            self.states[code] = State(self._taken.get(code, _NOTHING).seq, size, xor)

    def _settled(self, code: bytes) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """By first byte the keys in DRAM and elsewhere. Seen at both tiers: elsewhere, the stream will tell."""
        tiers = self._bins.pop(code, (Bins(), Bins()))
        for bins in tiers:
            bins.settle()
        fast, slow = (bins.by_byte for bins in tiers)
        for byte in fast.keys() | slow.keys():
            yield byte, apart(bytes(fast.pop(byte, b"")), bytes(slow.pop(byte, b"")))

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
            yield from self._remove(prefix, column(code), code, bytes_here)
        for byte in bytes_here:
            for code in differing:
                for tier, keys in enumerate(self._found.get(code, {}).pop(byte, ())):
                    for some in _slices(keys):
                        prefix.store_loose(column(code), some, tier)
                        yield

    def _remove(self, prefix: PrefixIndex, column: int, code: bytes, first_bytes: Collection[int]) -> Iterator[None]:
        """What the column holds of this shard and should not."""
        found: dict[int, set[bytes]] = {}
        for byte, (fast, slow) in self._found.get(code, {}).items():
            found[byte] = set(keys_of(fast + slow))
            yield
        for keys in prefix.inventory(column):
            for at in range(0, len(keys), SLICE):
                mine = (key for key in keys[at : at + SLICE] if key[0] in first_bytes)
                prefix.remove(column, b"".join(key for key in mine if key not in found.get(key[0], ())))
                yield


def _slices(keys: bytes) -> Iterator[bytes]:
    return (keys[at : at + SLICE * KEY] for at in range(0, len(keys), SLICE * KEY))
