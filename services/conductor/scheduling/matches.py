"""How long a prefix of one prompt each agent holds, as a column: what a decision reads for every instance at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.conductor.scheduling.views import Ints


class Matches(Mapping[str, int]):
    """Agent id -> blocks of the prompt held there. ``ids`` should be the same object from one decision to the next as
    long as the agents are the same: who reads the column remembers by it where its rows are."""

    __slots__ = ("_found", "blocks", "ids")

    def __init__(self, ids: tuple[str, ...], blocks: npt.NDArray[Any]) -> None:
        self.ids = ids
        self.blocks: Ints = blocks.astype(np.int64, copy=False)
        self._found: dict[str, int] | None = None

    @staticmethod
    def of(matches: Mapping[str, int]) -> Matches:
        if isinstance(matches, Matches):
            return matches
        return Matches(tuple(matches), np.fromiter(matches.values(), np.int64, len(matches)))

    @property
    def _held(self) -> dict[str, int]:
        if self._found is None:
            pairs = zip(self.ids, self.blocks.tolist(), strict=True)
            self._found = {id: blocks for id, blocks in pairs if blocks > 0}
        return self._found

    def __getitem__(self, id: str) -> int:
        return self._held[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Gather:
    """From the columns of :class:`Matches` to rows of one's own: where each of ``wanted`` agents is in them."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = wanted
        self._ids: tuple[str, ...] | None = None
        self._where = np.zeros(len(wanted), dtype=np.int64)
        self._missing: npt.NDArray[np.bool_] | None = None

    def blocks(self, matches: Matches) -> Ints:
        """Blocks by row of ``wanted``; 0 for agents that are not in ``matches``."""
        if not matches.ids:
            return np.zeros(len(self._wanted), dtype=np.int64)
        if matches.ids is not self._ids:
            self._learn(matches.ids)
        found: Ints = matches.blocks[self._where]
        if self._missing is not None:
            found[self._missing] = 0
        return found

    def _learn(self, ids: tuple[str, ...]) -> None:
        at = {id: column for column, id in enumerate(ids)}
        where = np.array([at.get(id, -1) for id in self._wanted], dtype=np.int64)
        missing = where < 0
        self._ids, self._where, self._missing = ids, where, missing if missing.any() else None
