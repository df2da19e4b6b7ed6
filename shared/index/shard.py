"""What a mirror knows of one shard, besides the blocks themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.index.digest import State
from shared.index.scan import Scan

RESYNC_FIRST, RESYNC_MOST = 0.25, 8.0  # pause between two resyncs of one shard

NOTHING = State()

Told = Mapping[bytes, tuple[State, int]]
"""Code -> what an agent says of itself, and its beat."""


@dataclass
class Shard:
    cursor: int = 0
    states: dict[bytes, State] = field(default_factory=dict)  # seq as followed, size and xor of what is held here
    republishing: set[bytes] = field(default_factory=set)
    swept: set[bytes] = field(default_factory=set)
    moment: tuple[int, Told] | None = None  # looked at, and to be compared once all up to its tip is read
    ahead: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # (seq here, beat) when first seen ahead
    latest: dict[bytes, int] = field(default_factory=dict)  # last batch seen
    exact: int = 0  # up to this id the scan may have seen effects of later entries
    differs: str = "new"
    not_before: float = 0.0
    pause: float = RESYNC_FIRST
    scan: Scan | None = None

    def difference(self, code: bytes, told: State, beat: int) -> str:
        """Why this copy is not what an agent says of itself, with nothing left to read; "" where it is, or may be."""
        mine = self.states.get(code, NOTHING)
        if mine.seq < told.seq:  # rule: behind
            return "behind"
        if mine.seq == told.seq:  # rule: mirror_compares
            self.ahead.pop(code, None)
            return "digest" if mine != told else ""
        seq, since = self.ahead.setdefault(code, (mine.seq, beat))
        if seq != mine.seq:
            self.ahead[code] = (mine.seq, beat)
            return ""
        return "ahead" if beat >= since + 2 else ""  # rule: ahead, if it has spoken twice since and still says so
