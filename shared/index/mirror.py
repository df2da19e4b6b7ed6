"""A conductor's copy of the index, pure: entries are applied, states compared, shards that differ read again.

Ids of stream entries are integers that grow. Who drives it: ``apply`` what was read after :meth:`cursor`; once a second
``look`` at one moment of each shard; while :meth:`due` names a shard, ``begin`` -> ``page`` ... -> ``finish``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from shared.blocks import key_count
from shared.errors import ProtocolError
from shared.index import SHARDS, shard_of
from shared.index.assembly import Partials, chains
from shared.index.digest import State, rotated, xor_keys
from shared.index.entry import ADD, BEGIN, DELETE, END, REPUBLISH, SWEPT, Entry, unpack
from shared.index.lines import Line, by_agent
from shared.index.prefix import Effect, PrefixIndex
from shared.index.scan import Scan
from shared.index.shard import NOTHING, RESYNC_FIRST, RESYNC_MOST, Shard, Told
from shared.index.vectors import Lengths

FORGET_AFTER = 60.0  # seconds until the entries of a dead incarnation leave memory


class Mirror:
    """All shards. Not thread-safe. ``differences`` counts why shards were read again. Where a change breaks half-way,
    nothing that is held can be told from what should be: all of it is dropped, and every shard is new."""

    def __init__(self, shards: int = SHARDS) -> None:
        self.differences: dict[str, int] = {}
        self.applied = 0
        self.garbage = 0
        self._living: frozenset[bytes] = frozenset()
        self._dead_since: dict[bytes, float] = {}
        self._spared: frozenset[bytes] = frozenset()
        self._empty(shards)

    def _empty(self, shards: int) -> None:
        self.prefix = PrefixIndex()
        self.columns: dict[bytes, int] = {}
        self._codes: dict[int, bytes] = {}
        self._shards = [Shard() for _ in range(shards)]
        self._partials = Partials()
        self._order: tuple[bytes, ...] | None = None
        self._take = np.empty(0, dtype=np.int64)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What happens in here happens to its end, or there is nothing left of it."""
        try:
            yield
        except BaseException:
            self.differences["broken"] = self.differences.get("broken", 0) + 1
            self._empty(len(self._shards))
            raise

    # -- questions ------------------------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Every shard was read, and none is known to differ."""
        return not any(shard.differs or shard.scan for shard in self._shards)

    def match(self, chain: bytes) -> dict[bytes, int]:
        """Code -> blocks of the prefix of ``chain`` that it holds; the living only, and only those with any."""
        lengths = self.prefix.match(chain)
        columns = lengths.nonzero()[0]
        found = zip(map(self._codes.get, columns.tolist()), lengths[columns].tolist(), strict=True)
        living = self._living  # rule: dead_uncounted
        return {code: blocks for code, blocks in found if code is not None and code in living}

    def lengths(self, chain: bytes) -> tuple[tuple[bytes, ...], Lengths]:
        """The living that have a column, and of each the blocks of the prefix of ``chain`` that it holds. The tuple is
        the same object until it changes."""
        if self._order is None:
            self._order = tuple(code for code in self.columns if code in self._living)
            self._take = np.array([self.columns[code] for code in self._order], dtype=np.int64)
        return self._order, self.prefix.match(chain)[self._take]

    def dram(self, chain: bytes) -> dict[bytes, int]:
        """Of those that hold some of that prefix elsewhere than in DRAM: the blocks before the first such one."""
        if not self.prefix.has_slow:
            return {}
        lengths = self.prefix.match(chain)
        before = self.prefix.fast(chain, lengths)
        columns = (before < lengths).nonzero()[0]
        found = zip(map(self._codes.get, columns.tolist()), before[columns].tolist(), strict=True)
        return {code: blocks for code, blocks in found if code is not None and code in self._living}

    def blocks(self) -> dict[bytes, int]:
        """Code -> blocks held, of the living."""
        return {code: sum(shard.states.get(code, NOTHING).size for shard in self._shards) for code in self._living}

    def living(self, codes: Collection[bytes], now: float) -> None:
        """The incarnations that count from now on. Others are forgotten after a while, unless they are spared."""
        living = frozenset(codes)
        if living != self._living:
            self._living, self._order = living, None
        for code in list(self.columns):
            if code in self._living:
                self._dead_since.pop(code, None)
            elif now - self._dead_since.setdefault(code, now) > FORGET_AFTER and not self._kept(code):
                self._forget(code)

    def _kept(self, code: bytes) -> bool:
        return code in self._spared or self._scanning

    def spare(self, codes: frozenset[bytes]) -> None:
        """Keep what is known of these, though they do not count (a mass expiry, see shared/index/breaker.py)."""
        self._spared = codes

    @property
    def _scanning(self) -> bool:
        return any(shard.scan is not None for shard in self._shards)

    # -- following ------------------------------------------------------------------------------------------

    def cursor(self, shard: int) -> int | None:
        """Read entries with greater ids; None while the shard is being read anew."""
        mine = self._shards[shard]
        return None if mine.scan is not None or mine.differs == "new" else mine.cursor

    def apply(self, read: Mapping[int, Sequence[tuple[int, bytes]]], now: float) -> None:
        """Shard -> (id, entry) in order. What comes together is put together: read all shards in one go."""
        with self._whole():
            self._apply(read, now)

    def _apply(self, read: Mapping[int, Sequence[tuple[int, bytes]]], now: float) -> None:
        if len(self._shards) == 1:
            touched = self._apply_stream(read.get(0, ()), now)
        else:
            touched = self._apply_together(read, now)
        self.prefix.places.flush()
        for (number, _), entry in touched.items():
            self._check(number, entry)
        for code in {entry.code for entry in touched.values() if entry.op == SWEPT}:
            self._swept(code)
        for number in read:
            self._compare(self._shards[number])

    def _apply_stream(self, entries: Sequence[tuple[int, bytes]], now: float) -> dict[tuple[int, bytes], Entry]:
        """Of the only shard, so nothing has to be put together. Agents do not depend on each other: one after the other
        what each has said. Returns the last entries by agent, as to be checked."""
        shard, touched = self._shards[0], dict[tuple[int, bytes], Entry]()
        for its in by_agent(entries):
            self._apply_agent(shard, its, touched, now)
        if entries:
            shard.cursor = entries[-1][0]
        return touched

    def _apply_agent(
        self, shard: Shard, entries: Sequence[tuple[int, bytes]], touched: dict[tuple[int, bytes], Entry], now: float
    ) -> None:
        at = 0
        while at < len(entries):
            entry = self._unpack(entries[at][1])
            at += 1
            if entry is None:
                continue
            self._follow(shard, entry)
            line = Line.of(0, entry)
            if line is not None:
                at = line.take(entries, at)
                shard.states[entry.code] = shard.states[entry.code]._replace(seq=line.state.seq)
                self._change_line(line)
                entry = entry._replace(state=line.state)
            else:
                self._change([(0, entry)], now)
            if entries[at - 1][0] > shard.exact or entry.op == SWEPT:
                touched[0, entry.code] = entry

    def _unpack(self, payload: bytes) -> Entry | None:
        try:
            return unpack(payload)
        except ProtocolError:
            self.garbage += 1
            return None

    def _apply_together(
        self, read: Mapping[int, Sequence[tuple[int, bytes]]], now: float
    ) -> dict[tuple[int, bytes], Entry]:
        """A batch's entries are in several shards, and belong together. Returns the same."""
        groups: dict[tuple[bytes, int, int, int], list[tuple[int, Entry]]] = {}
        touched: dict[tuple[int, bytes], Entry] = {}
        for number, entries in read.items():
            shard = self._shards[number]
            for at, (id, payload) in enumerate(entries):
                shard.cursor = id
                entry = self._unpack(payload)
                if entry is None:
                    continue
                self._follow(shard, entry)
                if entry.batch:
                    shard.latest[entry.code] = entry.batch
                    order = (entry.code, entry.batch, 0, 0)
                else:  # a republish: between the batches before and after it, this shard's alone
                    order = (entry.code, shard.latest.get(entry.code, 0), number + 1, at)
                groups.setdefault(order, []).append((number, entry))
                if id > shard.exact or entry.op == SWEPT:
                    touched[number, entry.code] = entry
        for order in sorted(groups):
            self._change_group(groups[order], now)
        return touched

    def _follow(self, shard: Shard, entry: Entry) -> None:
        """Sequence and phases, in stream order."""
        code, before = entry.code, shard.states.get(entry.code, NOTHING)
        if entry.op == SWEPT:
            shard.swept.add(code)
            return
        shard.swept.discard(code)
        if entry.op == BEGIN:
            shard.republishing.add(code)
        elif entry.state.seq > before.seq + 1:  # rule: gap
            self._differs(shard, "gap")
        if entry.op == END or not entry.flags & REPUBLISH:
            shard.republishing.discard(code)
        shard.states[code] = State(entry.state.seq, before.size, before.xor)

    def _change_group(self, group: Sequence[tuple[int, Entry]], now: float) -> None:
        line = Line.of(*group[0]) if len(group) == 1 else None
        if line is None:
            self._change(group, now)
        else:
            self._change_line(line)

    def _change_line(self, line: Line) -> None:
        entry, keys = line.first, b"".join(line.pieces)
        column = self._column(entry.code)
        self._account(line.number, entry, keys)
        if entry.op == DELETE:
            self._correct(entry, self.prefix.remove(column, keys))
        else:
            self._correct(entry, self.prefix.store(column, keys, line.parent, entry.tier))

    def _change(self, group: Sequence[tuple[int, Entry]], now: float) -> None:
        """The entries of one batch, or one entry of a republish."""
        first = group[0][1]
        if first.op not in (ADD, DELETE):
            return
        column = self._column(first.code)
        for number, entry in group:
            self._account(number, entry, entry.keys)
        entries = [entry for _, entry in group]
        if first.op == DELETE:
            self._correct(first, self.prefix.remove(column, b"".join(entry.keys for entry in entries)))
            return
        for parent, chain in chains(entries):
            self._correct(first, self.prefix.store(column, chain, parent, first.tier))
        if first.batch:
            for parent, chain in self._partials.add(entries, now):
                self.prefix.connect(chain, parent)

    def _column(self, code: bytes) -> int:
        column = self.columns.get(code)
        if column is None:
            column = self.columns[code] = self.prefix.add_column()
            self._codes[column] = code
            self._order = None
        return column

    def _account(self, number: int, entry: Entry, keys: bytes) -> None:
        """As if all ``keys`` changed something as ``entry`` says; :meth:`_correct` takes back what did not."""
        states = self._shards[number].states
        seq, size, xor = states.get(entry.code, NOTHING)
        n = key_count(keys)
        self.applied += n
        states[entry.code] = State(
            seq,
            size + n if entry.op == ADD else size - n,
            xor ^ rotated(xor_keys(keys), entry.tier if entry.op == ADD else 0),
        )

    def _correct(self, entry: Entry, effect: Effect) -> None:
        for keys, moved in ((effect.same, False), (effect.moved, True)):
            for key in keys:
                states = self._shards[shard_of(key, len(self._shards))].states
                seq, size, xor = states.get(entry.code, NOTHING)
                number = int.from_bytes(key, "big")
                if entry.op == ADD:
                    size -= 1
                    xor ^= rotated(number, 1 - entry.tier if moved else entry.tier)
                elif moved:
                    xor ^= number ^ rotated(number, 1)
                else:
                    size += 1
                    xor ^= number
                states[entry.code] = State(seq, size, xor)

    def _check(self, number: int, entry: Entry) -> None:
        """rule: mirror_compares, with the digest that the entry itself carries."""
        shard = self._shards[number]
        if entry.op in (BEGIN, SWEPT) or entry.flags & REPUBLISH or entry.code in shard.republishing:
            return
        if shard.states.get(entry.code, NOTHING) != entry.state:
            self._differs(shard, "digest")

    def _swept(self, code: bytes) -> None:
        everywhere = all(code in shard.swept or code not in shard.states for shard in self._shards)
        if everywhere and not self._scanning:  # a scan in progress knows columns; later then, in living()
            self._forget(code)

    def _forget(self, code: bytes) -> None:
        column = self.columns.pop(code, None)
        if column is not None:
            del self._codes[column]
            self._order = None
            self.prefix.drop(column)
        self._dead_since.pop(code, None)
        for shard in self._shards:
            shard.states.pop(code, None)
            shard.latest.pop(code, None)
            shard.ahead.pop(code, None)
            shard.swept.discard(code)
            shard.republishing.discard(code)

    # -- comparing ------------------------------------------------------------------------------------------

    def look(self, number: int, tip: int, told: Told) -> None:
        """``tip``: the shard's last stream id, ``told``: what the agents say of themselves, at one moment, just now."""
        shard = self._shards[number]
        if shard.scan is not None or shard.differs:
            return
        if tip < shard.cursor:
            if tip:
                self._differs(shard, "older")  # a stale copy took over
                return
            shard.cursor = shard.exact = 0  # flushed: keep what is known, the agents will say it all again
        shard.moment = (tip, told)
        self._compare(shard)

    def _compare(self, shard: Shard) -> None:
        """With the moment looked at last, as soon as nothing of it is left to read."""
        if shard.moment is None or shard.cursor < shard.moment[0] or shard.differs:
            return
        told, shard.moment = shard.moment[1], None
        for code, (state, beat) in told.items():
            counts = code in self._living and code not in shard.republishing
            if counts and (why := shard.difference(code, state, beat)):
                self._differs(shard, why)

    def _differs(self, shard: Shard, why: str) -> None:
        if not shard.differs:
            self.differences[why] = self.differences.get(why, 0) + 1
            shard.differs = why

    # -- reading a shard anew -------------------------------------------------------------------------------

    def due(self, now: float) -> int | None:
        """A shard to read anew now; one at a time."""
        if self._scanning:
            return None
        return next((n for n, shard in enumerate(self._shards) if shard.differs and now >= shard.not_before), None)

    def begin(self, number: int, tip: int, taken: Mapping[bytes, State]) -> None:
        """rule: id_first. ``tip`` and ``taken`` (what Redis holds of each) are of one moment, before the scan."""
        shard = self._shards[number]
        shard.scan = Scan(tip, dict(taken))

    def page(self, number: int, page: Mapping[bytes, bytes]) -> None:
        """Some of the shard's hash: key -> places."""
        scan = self._shards[number].scan
        if scan is not None:
            scan.add(page)

    def finish(self, number: int, tip: int, now: float) -> Iterator[None]:
        """The scan is complete, ``tip`` is the last id now. Work in slices: go on until it ends; other shards may be
        followed meanwhile. Whoever leaves the iterator before its end leaves an empty mirror."""
        shard = self._shards[number]
        scan = shard.scan
        assert scan is not None
        yield from scan.count()
        with self._whole():
            yield from scan.merge(self.prefix, self._column, shard.states, range(number, 256, len(self._shards)))
        shard.states = scan.states
        shard.cursor, shard.exact = scan.tip, tip
        for seen in (shard.republishing, shard.swept, shard.ahead):
            seen.clear()
        shard.scan, shard.differs, shard.moment = None, "", None
        quick = now - shard.not_before < 2 * RESYNC_MOST
        shard.pause = min(2 * shard.pause, RESYNC_MOST) if quick else RESYNC_FIRST
        shard.not_before = now + shard.pause

    def give_up(self, number: int, now: float) -> None:
        """The scan failed (Redis is gone): from the beginning, later, so that one shard that cannot be read keeps
        nobody from following the others."""
        shard = self._shards[number]
        shard.scan, shard.not_before = None, now + RESYNC_FIRST
