"""The live lists: what each instance is told once a second of the attempts that are live there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import Ref

Id = tuple[str, int]
"""(request, attempt)"""


@dataclass
class Page:
    """One instance's list. ``live``: id -> whether accepted. ``acked``: id -> number of the first list that says so,
    0 before that."""

    number: int = 0
    live: dict[Id, bool] = field(default_factory=dict)
    acked: dict[Id, int] = field(default_factory=dict)


class LiveLists:
    """A page an instance incarnation; another incarnation starts afresh."""

    def __init__(self) -> None:
        self._pages: dict[Ref, Page] = {}

    def __len__(self) -> int:
        """Entries on all pages."""
        return sum(len(page.live) for page in self._pages.values())

    def last(self, ref: Ref) -> int:
        """Number of the last list sent; only later ones count for what is sent now (rule: since_submit)."""
        page = self._pages.get(ref)
        return page.number if page else 0

    def add(self, ref: Ref, id: Id) -> None:
        """Listed from when it is sent (rule: from_send)."""
        self._pages.setdefault(ref, Page()).live.setdefault(id, False)

    def accept(self, ref: Ref, id: Id) -> None:
        page = self._pages.get(ref)
        if page and id in page.live:
            page.live[id] = True

    def remove(self, ref: Ref, id: Id, complete: bool) -> None:
        """``complete``: its outputs are here in full, the instance may forget them."""
        page = self._pages.get(ref)
        if page and page.live.pop(id, None) is not None and complete:
            page.acked[id] = 0

    def next(self, ref: Ref) -> tuple[int, list[tuple[str, int, bool]], list[Id]]:
        """(number, attempts, acked) of the next list (rule: numbered)."""
        page = self._pages.setdefault(ref, Page())
        page.number += 1
        for id, first in page.acked.items():
            page.acked[id] = first or page.number
        return page.number, [(*id, accepted) for id, accepted in page.live.items()], list(page.acked)

    def answered(self, ref: Ref, number: int) -> list[Id]:
        """The instance has that list, and forgot what it was told to. Returns the attempts accepted there."""
        page = self._pages.get(ref)
        if page is None:
            return []
        page.acked = {id: first for id, first in page.acked.items() if not first or first > number}
        return [id for id, accepted in page.live.items() if accepted]

    def drop(self, ref: Ref) -> None:
        """The instance is gone for good."""
        self._pages.pop(ref, None)
