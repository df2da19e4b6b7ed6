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

    live: dict[Id, bool] = field(default_factory=dict)
    acked: dict[Id, int] = field(default_factory=dict)


class LiveLists:
    """A page an instance incarnation; another incarnation starts afresh. Lists are numbered by rounds, the same for all
    instances: what prefill was told of the last number sent must hold at decode too, which it passes it on to."""

    def __init__(self) -> None:
        self._pages: dict[Ref, Page] = {}
        self.last = 0
        """Number of the last round sent; only later lists count for what is sent now (rule: since_submit)."""

    def __len__(self) -> int:
        """Entries on all pages."""
        return sum(len(page.live) for page in self._pages.values())

    def begin_round(self) -> int:
        """The next round's number (rule: numbered)."""
        self.last += 1
        return self.last

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

    def page(self, ref: Ref) -> tuple[list[tuple[str, int, bool]], list[Id]]:
        """(attempts, acked) of the current round's list."""
        page = self._pages.get(ref)
        if page is None:
            return [], []
        for id, first in page.acked.items():
            page.acked[id] = first or self.last
        return [(*id, accepted) for id, accepted in page.live.items()], list(page.acked)

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
