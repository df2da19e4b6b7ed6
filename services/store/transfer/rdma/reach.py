"""What may be reached of a segment by RDMA: its memory regions with the keys that each NIC needs for them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec

from shared.errors import OutOfRange, ProtocolError

LARGEST = 1 << 48
Keys = Mapping[str, int]
"""NIC -> its key of one memory region."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One memory region: the bytes of the segment from ``offset`` on lie at ``address``."""

    offset: int
    length: int
    address: int
    keys: dict[str, int]


class Table(msgspec.Struct, frozen=True):
    """Where the generations are: word i (uint64, native order) is that of the bytes from i * slot_bytes on."""

    address: int
    slots: int
    slot_bytes: int
    keys: dict[str, int]


class Place(NamedTuple):
    """An address inside one memory region."""

    address: int
    keys: Keys


class Reach(msgspec.Struct, frozen=True, dict=True):
    """A segment. ``parts`` lie one behind the other and cover it. ``check``: what a READ has to be followed by: "open"
    (nothing), "table" (the generations are compared), "ask" (the owner is asked)."""

    name: str
    instance: int
    size: int
    location: str
    parts: list[Part]
    check: str = "open"
    table: Table | None = None

    def verify(self) -> Reach:
        """Itself. Raises ProtocolError where a peer says what cannot be."""
        at = 0
        for part in self.parts:
            if part.offset != at or part.length <= 0 or not 0 <= part.address < LARGEST << 16:
                raise ProtocolError(f"the memory regions of segment {self.name} do not follow each other")
            at += part.length
        if at != self.size or self.size > LARGEST or self.check not in ("open", "table", "ask"):
            raise ProtocolError(f"the memory regions of segment {self.name} do not cover it")
        table = self.table
        if (self.check == "table") != (table is not None):
            raise ProtocolError(f"segment {self.name} has no table of generations")
        if table is not None and (table.slot_bytes <= 0 or table.slots * table.slot_bytes < self.size):
            raise ProtocolError(f"the table of generations of segment {self.name} does not cover it")
        return self

    @cached_property
    def starts(self) -> list[int]:
        return [part.offset for part in self.parts]

    def renew(self, other: Reach) -> bool:
        """Take over the keys of the same memory as it is reached now; False: it is other memory."""
        if (self.instance, self.starts, self.size) != (other.instance, other.starts, other.size):
            return False
        for mine, new in zip(self.parts, other.parts, strict=True):
            mine.keys.update(new.keys)
        if self.table is not None and other.table is not None:
            self.table.keys.update(other.table.keys)
        return True

    def at(self, offset: int, length: int) -> Place:
        """Raises OutOfRange unless the range is inside one memory region."""
        index = bisect_right(self.starts, offset) - 1
        if index < 0 or length <= 0 or offset + length > (part := self.parts[index]).offset + part.length:
            raise OutOfRange(f"[{offset}, {offset}+{length}) is in no memory region of segment {self.name}")
        return Place(part.address + offset - part.offset, part.keys)

    def words(self, slots: range) -> Place:
        """Where the generations of ``slots`` are."""
        assert self.table is not None
        return Place(self.table.address + 8 * slots.start, self.table.keys)

    def slots(self, offset: int, length: int) -> range:
        """Those that a range touches."""
        assert self.table is not None
        return range(offset // self.table.slot_bytes, (offset + length - 1) // self.table.slot_bytes + 1)
