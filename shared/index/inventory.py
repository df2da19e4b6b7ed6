"""What an agent holds of one shard: key -> tier, with its digest; in 64 dicts, so that none stalls as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from shared.blocks import KEY
from shared.index.digest import rotated

PARTS = 64


class Inventory:
    """``xor``: as in :class:`shared.index.digest.State`. ``slow``: how many keys are not in DRAM."""

    def __init__(self) -> None:
        self.xor = 0
        self.slow = 0
        self._parts: list[dict[bytes, int]] = [{} for _ in range(PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, key: bytes) -> bool:
        return key in self._parts[key[KEY - 1] % PARTS]  # the first byte decides the shard

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._parts)

    def items(self) -> Iterator[tuple[bytes, int]]:
        for part in self._parts:
            yield from part.items()

    def change(self, key: bytes, tier: int) -> int:
        """``key`` is at ``tier`` now (-1: not held). Returns the tier before."""
        part = self._parts[key[KEY - 1] % PARTS]
        old = part.get(key, -1)
        if old == tier:
            return old
        if tier >= 0:
            part[key] = tier
        else:
            del part[key]
        number = int.from_bytes(key, "big")
        for one in (old, tier):
            if one >= 0:
                self.xor ^= rotated(number, one)
        self.slow += (tier > 0) - (old > 0)
        return old
