"""From block keys to agents: the index speaks of agent codes, scheduling of agent ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shared.records import AgentRecord


class Matcher(Protocol):
    """The conductor's mirror of the block index."""

    def match(self, keys: bytes) -> Mapping[bytes, int]:
        """Agent code -> length in blocks of the prefix of ``keys`` that it holds; agents with none may be left out."""

    def dram(self, keys: bytes) -> Mapping[bytes, int]:
        """Of agents that have some of that prefix on SSD: how many blocks of it come before the first such one."""

    def living(self, codes: set[bytes]) -> None:
        """Agents alive now; entries of others do not count."""

    def summary(self) -> Mapping[str, Any]:
        """JSON-able: blocks per agent code (hex), sync state."""


class NoIndex:
    """Before the mirror is attached: nobody has anything."""

    def match(self, keys: bytes) -> Mapping[bytes, int]:
        return {}

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

    def put(self, record: AgentRecord) -> None:
        self.remove(record.ref.id)
        self.records[record.ref.id] = record
        self._by_code[record.code] = record.ref.id

    def remove(self, id: str) -> None:
        record = self.records.pop(id, None)
        if record:
            self._by_code.pop(record.code, None)

    def lengths(self, matches: Mapping[bytes, int]) -> dict[str, int]:
        """Agent id -> blocks, living incarnations only."""
        return {id: blocks for id, blocks in self.named(matches).items() if blocks > 0}

    def named(self, values: Mapping[bytes, int]) -> dict[str, int]:
        """By agent id, living incarnations only."""
        return {id: value for code, value in values.items() if (id := self._by_code.get(code)) is not None}
