"""A writer's account of grants towards one peer: which are refused for good, which still have slices in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

REMEMBERED = 1 << 16


class Ledger:
    """Pure. Grant 0 means "no grant" and is never refused. A slice counts as in flight from when it is posted until its
    outcome is certain: that of a broken stream stays until the target said that the stream is gone."""

    def __init__(self) -> None:
        self._refused: dict[int, None] = {}
        self._flying: Counter[int] = Counter()
        self._waiting: list[tuple[frozenset[int], Callable[[], None]]] = []

    def refuse(self, grants: Iterable[int]) -> None:
        """For good (``writer_refuses``); only the last 65,536 are remembered, the target's own check is behind."""
        for grant in grants:
            if grant:
                self._refused[grant] = None
        while len(self._refused) > REMEMBERED:
            del self._refused[next(iter(self._refused))]

    def refuses(self, grant: int) -> bool:
        return grant in self._refused

    def post(self, grant: int, slices: int = 1) -> None:
        self._flying[grant] += slices

    def land(self, grant: int, slices: int = 1) -> None:
        self._flying[grant] -= slices
        if not self._flying[grant]:
            del self._flying[grant]
            self._tell()

    def outstanding(self) -> set[int]:
        return set(self._flying)

    def flying(self, grants: Iterable[int]) -> bool:
        return any(grant in self._flying for grant in grants)

    def when_drained(self, grants: Iterable[int], tell: Callable[[], None]) -> Callable[[], None]:
        """``tell`` is called once none of ``grants`` is in flight, maybe now. Returns what stops the waiting."""
        entry = (frozenset(grants), tell)
        self._waiting.append(entry)
        self._tell()
        return lambda: self._waiting.remove(entry) if entry in self._waiting else None

    def _tell(self) -> None:
        done = [entry for entry in self._waiting if not self.flying(entry[0])]
        self._waiting = [entry for entry in self._waiting if entry not in done]
        for _, tell in done:
            tell()
