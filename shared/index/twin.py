"""One shard as Redis keeps it, in memory: the scripts ``index_*.lua`` in Python, for tests and simulations.

Checked against the real scripts by a differential test. Stream ids are plain integers here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.blocks import split_keys
from shared.index.digest import State, rotated
from shared.index.entry import ADD, BEGIN, DELETE, END, FORCE, REPUBLISH, Entry, swept, unpack

OK, RESYNC, DIFFERS = "ok", "resync", "differs"


@dataclass
class ShardTwin:
    """``blocks``: key -> {code: tier}; ``taken``: code -> State; ``told``: code -> (State, beat); ``stream``: (id,
    payload), ids ascending."""

    blocks: dict[bytes, dict[bytes, int]] = field(default_factory=dict)
    taken: dict[bytes, State] = field(default_factory=dict)
    told: dict[bytes, tuple[State, int]] = field(default_factory=dict)
    stream: list[tuple[int, bytes]] = field(default_factory=list)
    last: int = 0

    def apply(self, payload: bytes) -> tuple[str, State | None]:
        """(status, what is held of the agent now; None: nothing is known of it)."""
        entry = unpack(payload)
        if not self.blocks and any(state.size for state in self.taken.values()):
            self.taken.clear()  # the hash has vanished
        held = self.taken.get(entry.code)
        state, before = entry.state, held or State()
        follows = state.seq > before.seq if entry.op == BEGIN else state.seq == before.seq + 1  # rule: sequence
        if not follows:
            return RESYNC, held
        held = self.taken[entry.code] = self._change(entry, before)
        self._append(payload)
        compared = entry.op == END or (entry.op != BEGIN and not entry.flags & REPUBLISH)
        return (DIFFERS if compared and held != state else OK), held

    def _change(self, entry: Entry, before: State) -> State:
        count, xor = before.size, before.xor
        for key in split_keys(entry.keys):
            places = self.blocks.setdefault(key, {})
            old, number = places.get(entry.code), int.from_bytes(key, "big")
            if old is not None and (entry.op == DELETE or old != entry.tier):
                del places[entry.code]
                count, xor = count - 1, xor ^ rotated(number, old)
            if entry.op == ADD and old != entry.tier:
                places[entry.code] = entry.tier
                count, xor = count + 1, xor ^ rotated(number, entry.tier)
            if not places:
                del self.blocks[key]
        if entry.op == END and entry.flags & FORCE:
            return entry.state
        return State(entry.state.seq, count, xor)

    def _append(self, payload: bytes) -> None:  # rule: atomic
        self.last += 1
        self.stream.append((self.last, payload))

    def beat(self, code: bytes, state: State, beat: int) -> tuple[State | None, int]:
        self.told[code] = (state, beat)
        if not self.blocks and self.taken.get(code, State()).size:
            self.taken.clear()
        return self.taken.get(code), len(self.blocks)

    def tip(self) -> tuple[int, dict[bytes, State], dict[bytes, tuple[State, int]]]:
        return (self.stream[-1][0] if self.stream else 0), dict(self.taken), dict(self.told)

    def held(self, code: bytes) -> dict[bytes, int]:
        return {key: places[code] for key, places in self.blocks.items() if code in places}

    def codes(self) -> set[bytes]:
        """Whose entries are in the hash."""
        return {code for places in self.blocks.values() for code in places}

    def sweep(self, dead: Iterable[bytes]) -> None:
        """All pages at once."""
        for code in dead:
            for key in self.held(code):
                del self.blocks[key][code]
                if not self.blocks[key]:
                    del self.blocks[key]
            told, taken = self.told.pop(code, None), self.taken.pop(code, None)
            if told is not None or taken is not None:  # rule: sweep_seq
                self._append(swept(code))

    def read(self, after: int) -> list[tuple[int, bytes]]:
        """Entries with a greater id, as far as they are still there."""
        return [(id, payload) for id, payload in self.stream if id > after]

    def trim(self, keep: int = 0) -> None:
        self.stream = self.stream[len(self.stream) - keep :] if keep else []
