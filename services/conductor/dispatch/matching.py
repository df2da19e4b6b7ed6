"""From block keys to agents: the index speaks of agent codes, scheduling of agent ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.conductor.scheduling import Matches
from shared.records import AgentRecord


class Matcher(Protocol):
    """The conductor's mirror of the block index."""

    def lengths(self, keys: bytes) -> tuple[tuple[bytes, ...], npt.NDArray[Any]]:
        """Agent codes, and length in blocks of the prefix of ``keys`` that each holds (0 too). The codes are the same
        object until they change."""

    def dram(self, keys: bytes) -> Mapping[bytes, int]:
        """Of agents that have some of that prefix on SSD: how many blocks of it come before the first such one."""

    def living(self, codes: set[bytes]) -> None:
        """Agents alive now; entries of others do not count."""

    def summary(self) -> Mapping[str, Any]:
        """JSON-able: blocks per agent code (hex), sync state."""


class NoIndex:
    """Before the mirror is attached: nobody has anything."""

    def lengths(self, keys: bytes) -> tuple[tuple[bytes, ...], npt.NDArray[Any]]:
        return (), np.empty(0, dtype=np.int64)

    def dram(self, keys: bytes) -> Mapping[bytes, int]:
        return {}

    def living(self, codes: set[bytes]) -> None:
        pass

    def summary(self) -> Mapping[str, Any]:
        return {"synced": False}


class AgentTable:
    """The registered store agents by id. Codes of earlier incarnations mean nobody."""

    def __init__(self) -> None:
        self.records: dict[str, AgentRecord] = {}
        self._by_code: dict[bytes, str] = {}
        self._codes: tuple[bytes, ...] | None = None
        self._ids: tuple[str, ...] = ()
        self._known: npt.NDArray[Any] | None = None

    def put(self, record: AgentRecord) -> None:
        self.remove(record.ref.id)
        self.records[record.ref.id] = record
        self._by_code[record.code] = record.ref.id
        self._codes = None

    def remove(self, id: str) -> None:
        record = self.records.pop(id, None)
        if record:
            self._by_code.pop(record.code, None)
            self._codes = None

    def matches(self, codes: tuple[bytes, ...], blocks: npt.NDArray[Any]) -> Matches:
        """Columns by code -> by agent id, living incarnations only."""
        if codes is not self._codes:
            ids = [self._by_code.get(code) for code in codes]
            known = [at for at, id in enumerate(ids) if id is not None]
            self._known = None if len(known) == len(ids) else np.array(known, dtype=np.int64)
            self._codes, self._ids = codes, tuple(id for id in ids if id is not None)
        return Matches(self._ids, blocks if self._known is None else blocks[self._known])

    def named(self, values: Mapping[bytes, int]) -> dict[str, int]:
        """By agent id, living incarnations only."""
        return {id: value for code, value in values.items() if (id := self._by_code.get(code)) is not None}
