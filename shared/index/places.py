"""Where a key is: in a run, or loose (its parent is not known), or nowhere. 256 dicts, so that none grows for long."""

from __future__ import annotations

from collections.abc import Iterator

MOST_SHARED = 1 << 16


class Places:
    """Key -> place >= 0 (run id and position), or ``~holders`` < 0 for a loose key (bitmap of columns)."""

    def __init__(self) -> None:
        self.dicts: list[dict[bytes, int]] = [{} for _ in range(256)]
        self.loose = 0
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self.dicts))

    def get(self, key: bytes) -> int | None:
        return self.dicts[key[0]].get(key)

    def holders(self, key: bytes) -> int:
        """Columns that hold ``key``, where it is loose; 0 otherwise."""
        at = self.dicts[key[0]].get(key)
        return ~at if at is not None and at < 0 else 0

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

    def page(self, byte: int, size: int) -> Iterator[list[tuple[bytes, int]]]:
        """What lies under one first byte, in slices of ``size``: changes between slices may be missed."""
        keys = list(self.dicts[byte])
        for at in range(0, len(keys), size):
            found = ((key, self.dicts[byte].get(key)) for key in keys[at : at + size])
            yield [(key, place) for key, place in found if place is not None]
