"""What all slabs hold together, as a sum of which only the part that changed is counted again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Census:
    """``totals``: by kind, over all that are in it; also of ``kinds`` that nobody has."""

    def __init__(self, kinds: Iterable[str] = ()) -> None:
        self.totals: dict[str, float] = dict.fromkeys(kinds, 0)
        self._parts: dict[str, Mapping[str, float]] = {}

    def count(self, name: str, amounts: Mapping[str, float]) -> None:
        """``amounts`` take the place of what was counted under this name before."""
        before = self._parts.get(name, {})
        self._parts[name] = amounts
        for kind in before.keys() | amounts.keys():
            change = amounts.get(kind, 0) - before.get(kind, 0)
            self.totals[kind] = self.totals.get(kind, 0) + change

    def forget(self, name: str) -> None:
        self.count(name, {})
        del self._parts[name]
