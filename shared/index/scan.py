"""Reading a shard anew: what its hash holds, and making the mirror's copy equal to it, in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shared.index.digest import State, rotated, xor_keys
from shared.index.prefix import PrefixIndex

PLACE = 9  # bytes: code, tier
SLICE = 1000  # keys between two yields

_NOTHING = State()


class Scan:
    """``tip``: stream id from which to follow afterwards; ``taken``: sequences at that moment."""

    def __init__(self, tip: int, taken: dict[bytes, State]) -> None:
        self.tip = tip
        self.states: dict[bytes, State] = {}
        self._taken = taken
        self._found: dict[bytes, dict[bytes, int]] = {}  # code -> key -> tier
        self._parsed: dict[bytes, list[tuple[dict[bytes, int], int]]] = {}

    def add(self, flat: Sequence[bytes]) -> None:
        """Pages of HSCAN: keys may come twice, and those that change meanwhile in either state."""
        for key, places in zip(flat[::2], flat[1::2], strict=True):
            targets = self._parsed.get(places)
            if targets is None:
                targets = self._parsed[places] = self._parse(places)
            for found, tier in targets:
                found[key] = tier

    def _parse(self, places: bytes) -> list[tuple[dict[bytes, int], int]]:
        """Many keys have the same places."""
        return [
            (self._found.setdefault(places[at : at + PLACE - 1], {}), places[at + PLACE - 1])
            for at in range(0, len(places) - PLACE + 1, PLACE)
        ]

    def count(self) -> Iterator[None]:
        """Fill ``states``: what was found, with the sequences that belong to it."""
        for code in self._taken.keys() | self._found.keys():
            found, xor = self._found.get(code, {}), 0
            for tier in (0, 1):
                keys = [key for key, at in found.items() if at == tier]
                for start in range(0, len(keys), SLICE):
                    xor ^= rotated(xor_keys(b"".join(keys[start : start + SLICE])), tier)
                    yield
            self.states[code] = State(self._taken.get(code, _NOTHING).seq, len(found), xor)

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
        surplus = {column(code): self._found.get(code, {}) for code in differing if states.get(code, _NOTHING).size}
        for byte in first_bytes if surplus else ():
            yield from self._remove(prefix, byte, surplus)
        for code in differing:
            yield from self._store(prefix, column(code), self._found.get(code, {}))

    def _remove(self, prefix: PrefixIndex, byte: int, surplus: Mapping[int, Mapping[bytes, int]]) -> Iterator[None]:
        """What the columns hold under this first byte and should not."""
        for rows in prefix.places.page(byte, SLICE):
            for key, _ in rows:
                for column, found in surplus.items():
                    if key not in found and prefix.tier(column, key) >= 0:
                        prefix.remove(column, key)
            yield

    def _store(self, prefix: PrefixIndex, column: int, found: Mapping[bytes, int]) -> Iterator[None]:
        for tier in (0, 1):
            keys = [key for key, at in found.items() if at == tier]
            for start in range(0, len(keys), SLICE):
                prefix.store_loose(column, keys[start : start + SLICE], tier)
                yield
