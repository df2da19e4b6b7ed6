"""The SSD tier's book and log against a naive model and a disk of dictionaries, with crashes, cuts and flipped bits."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.ssd.book import Block, Book, Placement, trimmed
from services.store.ssd.journal import ENTRY, HEADER, Codec, Entry, Live, Op, new_header, recover, rewrite
from services.store.tenants import Quotas, tag_of
from tests.examples import examples

SPACES = (b"A" * 16, b"B" * 16)
STRIDES = {SPACES[0]: 4096, SPACES[1]: 12288}
CAPACITY, SEGMENT = 10 * 4096, 3 * 4096
KEYS = [bytes([i]) * 16 for i in range(14)]
LIMITS = {"small": 4 * 4096, "large": CAPACITY}
TENANT_OF = {key: tag_of(["", "small", "large", "unlimited"][key[0] % 4]) for key in KEYS}
spaces, keys = st.sampled_from(SPACES), st.sampled_from(KEYS)


def check(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content)


def fitting(live: Live) -> Live:
    """As the folder is opened: a damaged log may have lost that a segment is gone; the youngest are kept that fit."""
    kept, room = [], CAPACITY
    for e in reversed([e for e in live.entries if e.op is Op.SEGMENT]):
        if e.slot * e.length <= room:
            kept.append(e.segment)
            room -= e.slot * e.length
    return trimmed(live, kept)


class Machine(RuleBasedStateMachine):
    """``disk``: place -> bytes; ``log``: the file; ``truth``: per namespace, least recently used first."""

    @initialize()
    def begin(self) -> None:
        self.book = Book(CAPACITY, SEGMENT, Quotas(named=LIMITS))
        self.log = bytearray(new_header())
        self.disk: dict[tuple[int, int], bytes] = {}
        self.truth: dict[bytes, OrderedDict[bytes, bytes]] = {s: OrderedDict() for s in SPACES}
        self.reading: list[tuple[Block, bytes]] = []
        self.version, self.seq = 0, 1

    def write(self, entries: list[Entry]) -> None:
        self.log += Codec(bytes(self.log[:HEADER])).encode_all(entries, self.seq)
        self.seq += len(entries)

    def place(self, space: bytes, key: bytes) -> Placement | None:
        if self.book.find(space, key) or self.book.writing(space, key):
            return None
        placement = self.book.place(space, STRIDES[space], key, b"", 100, TENANT_OF[key])
        if placement is None:
            return None
        for name in placement.left:
            if name[0] == space and not placement.removed:
                pinned = {block.key for block, _ in self.reading if block.namespace == space and not block.gone}
                assert name[1] == next(k for k in self.truth[space] if k not in pinned - {name[1]})
            del self.truth[name[0]][name[1]]
        return placement

    def put_bytes(self, placement: Placement) -> tuple[bytes, Entry]:
        self.version += 1
        content = placement.block.key + self.version.to_bytes(8, "little")
        self.disk[placement.put.where] = content
        return content, replace(placement.put, checksum=check(content))

    @rule(space=spaces, some=st.lists(keys, min_size=1, max_size=5, unique=True), dropped=st.sets(keys, max_size=2))
    def job(self, space: bytes, some: list[bytes], dropped: set[bytes]) -> None:
        """Some are dropped while they are being written."""
        placed = [p for p in (self.place(space, key) for key in some) if p is not None]
        self.write([e for p in placed for e in p.before])
        done = [(p, *self.put_bytes(p)) for p in placed]
        for key in dropped:
            if self.book.writing(space, key):
                assert self.book.drop(space, key) is None
        self.write([put for _, _, put in done])
        for p, content, put in done:
            if self.book.written(p, put.checksum):
                assert p.block.key not in dropped
                self.truth[space][p.block.key] = content
            else:
                self.write([self.book.abandon(p)])

    @rule(space=spaces, key=keys)
    def given_up(self, space: bytes, key: bytes) -> None:
        placement = self.place(space, key)
        if placement is not None:
            self.write(placement.before)
            self.book.abandon(placement)

    @rule(space=spaces, key=keys)
    def drop(self, space: bytes, key: bytes) -> None:
        entry = self.book.drop(space, key)
        assert (entry is not None) == (key in self.truth[space])
        self.truth[space].pop(key, None)
        self.write([entry] if entry else [])

    @rule(space=spaces, key=keys)
    def touch(self, space: bytes, key: bytes) -> None:
        self.book.touch(space, key)
        if key in self.truth[space]:
            self.truth[space].move_to_end(key)

    @rule(space=spaces, key=keys)
    def read(self, space: bytes, key: bytes) -> None:
        block = self.book.find(space, key)
        if block is not None and len(self.reading) < 4:
            self.book.pin(block)
            self.reading.append((block, self.truth[space][key]))

    @precondition(lambda self: self.reading)
    @rule()
    def has_read(self) -> None:
        block, content = self.reading.pop()
        assert self.disk[block.segment, block.slot] == content, "written over while it was read"
        self.book.unpin(block)

    # -- faults ------------------------------------------------------------------------------------------------

    def restart(self) -> list[Block]:
        """A new agent with what the log says. Returns the blocks whose bytes are not those of their entry."""
        live = fitting(recover(bytes(self.log)))
        self.log = bytearray(rewrite(live))
        self.seq = len(live.entries) + 1
        self.book, self.reading = Book(CAPACITY, SEGMENT, Quotas(named=LIMITS)), []
        self.book.load(live)
        wrong = []
        for space in SPACES:
            old, self.truth[space] = self.truth[space], OrderedDict()
            for block in list(self.book.blocks(space)):
                content = self.disk[block.segment, block.slot]
                if check(content) != block.checksum:
                    wrong.append(block)
                    continue
                assert content[:16] == block.key
                assert block.key not in old or content <= old[block.key]
                self.truth[space][block.key] = content
        return wrong

    @rule()
    def killed(self) -> None:
        before = {s: dict(t) for s, t in self.truth.items()}
        assert self.restart() == []
        assert {s: dict(t) for s, t in self.truth.items()} == before

    @rule(space=spaces, some=st.lists(keys, min_size=1, max_size=4, unique=True), data=st.data())
    def killed_in_a_job(self, space: bytes, some: list[bytes], data: st.DataObject) -> None:
        """At any byte: what was there and made no way is there, and nothing has wrong bytes."""
        placed = [p for p in (self.place(space, key) for key in some) if p is not None]
        before, after = self.log[:], {s: dict(t) for s, t in self.truth.items()}
        self.write([e for p in placed for e in p.before])
        ways = len(self.log)
        stop = data.draw(st.integers(0, 2))
        if stop:
            done = [self.put_bytes(p) for p in placed[: data.draw(st.integers(0, len(placed)))]]
            self.write([put for _, put in done] if stop == 2 else [])
        least = len(before) if stop == 0 else ways
        del self.log[data.draw(st.integers(least, len(self.log))) :]
        assert self.restart() == []
        for s in SPACES:
            assert after[s].items() <= self.truth[s].items()

    @rule(data=st.data(), flip=st.booleans())
    def damaged(self, data: st.DataObject, flip: bool) -> None:
        """Any cut, any bit: fewer blocks, perhaps old ones whose bytes do not check; never others' bytes."""
        if flip:
            at = data.draw(st.integers(0, 8 * len(self.log) - 1))
            self.log[at // 8] ^= 1 << at % 8
        else:
            del self.log[data.draw(st.integers(0, len(self.log))) :]
        for block in self.restart():
            entry = self.book.drop(block.namespace, block.key)
            assert entry is not None
            self.write([entry])

    # -- what holds always -------------------------------------------------------------------------------------

    @invariant()
    def as_the_model(self) -> None:
        for space in SPACES:
            found = [(b.key, self.disk[b.segment, b.slot]) for b in self.book.blocks(space)]
            assert found == list(self.truth[space].items())
            assert all(b.checksum == check(self.disk[b.segment, b.slot]) for b in self.book.blocks(space))
        assert len(self.book) == sum(map(len, self.truth.values()))
        assert self.book.size <= CAPACITY

    @invariant()
    def every_block_is_somebodys(self) -> None:
        """Counted by place, and each limited tenant's oldest is the one that was used least recently in all spaces."""
        blocks = sorted((b for space in SPACES for b in self.book.blocks(space)), key=lambda b: b.used)
        used: dict[int, int] = {}
        for block in blocks:
            used[block.tenant] = used.get(block.tenant, 0) + STRIDES[block.namespace]
            assert block.tenant == TENANT_OF[block.key]
        assert self.book.owners.quotas.used == used
        for tenant in LIMITS:
            mine = (b for b in blocks if b.tenant == tag_of(tenant) and not b.readers)
            assert self.book.owners.oldest(tag_of(tenant)) is next(mine, None)

    @invariant()
    def every_place_is_used_once(self) -> None:
        kept = {(b.segment, b.slot) for b, _ in self.reading if b.gone}
        for segment in self.book.segments.values():
            gone = [slot for id, slot in kept if id == segment.id]
            assert sorted([*segment.free, *segment.blocks, *gone]) == list(range(segment.slots))


Machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestBook = Machine.TestCase


@given(st.binary(max_size=4 * ENTRY))
def test_any_bytes_are_a_log(data: bytes) -> None:
    recover(data)
    recover(new_header() + data)


def test_entries_come_back() -> None:
    entries = [
        Entry(Op.SEGMENT, 0, 4, 4096, 0, SPACES[0], seq=1),
        Entry(Op.PUT, 0, 3, 100, (1 << 64) - 1, SPACES[0], KEYS[1], KEYS[2], seq=2),
        Entry(Op.PUT, 0, 1, 4096, 7, SPACES[0], KEYS[3], seq=3, tenant=(1 << 64) - 1),
    ]
    header = new_header()
    log = header + Codec(header).encode_all(entries, 1)
    assert recover(log).entries == entries
    again = recover(rewrite(recover(log)))
    assert (again.entries, again.bad, again.segment) == (entries, 0, 0)


def test_entries_of_another_log_do_not_check() -> None:
    entries = [Entry(Op.SEGMENT, 0, 4, 4096, 0, SPACES[0], seq=1)]
    ours, theirs = new_header(), new_header()
    other = Codec(theirs).encode(Entry(Op.PUT, 0, 0, 9, 9, SPACES[0]), 2)
    log = ours + Codec(ours).encode_all(entries, 1) + other
    assert (recover(log).entries, recover(log).bad) == (entries, 1)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(Op.PUT, 1, 0, 9, 9, SPACES[0], KEYS[0], seq=2),  # no such segment
        Entry(Op.PUT, 0, 4, 9, 9, SPACES[0], KEYS[0], seq=2),  # no such slot
        Entry(Op.PUT, 0, 0, 4097, 9, SPACES[0], KEYS[0], seq=2),  # longer than a slot
        Entry(Op.PUT, 0, 0, 9, 9, SPACES[1], KEYS[0], seq=2),  # another namespace's segment
        Entry(Op.PUT, 0, 0, 9, 9, SPACES[0], KEYS[0], seq=1),  # an old number
        Entry(Op.SEGMENT, 0, 4, 4096, 0, SPACES[1], seq=2),  # taken
    ],
)
def test_entries_that_cannot_be_are_skipped(entry: Entry) -> None:
    header, first = new_header(), Entry(Op.SEGMENT, 0, 4, 4096, 0, SPACES[0], seq=1)
    codec = Codec(header)
    live = recover(header + codec.encode(first, 1) + codec.encode(entry, entry.seq))
    assert (live.entries, live.bad) == ([first], 1)


def test_blocks_of_dead_namespaces_make_way() -> None:
    book = Book(CAPACITY, SEGMENT)
    for key in KEYS[:6]:
        old = book.place(SPACES[0], 4096, key, b"", 10)
        assert old is not None and book.written(old, 1)
    for key in KEYS[:3]:
        new = book.place(SPACES[1], 12288, key, b"", 10)
        assert new is not None and book.written(new, 1)
    assert len(list(book.blocks(SPACES[1]))) == 3 and not list(book.blocks(SPACES[0]))


def test_nothing_is_written_where_all_is_being_read() -> None:
    book = Book(4096, 4096)
    first = book.place(SPACES[0], 4096, KEYS[0], b"", 10)
    assert first is not None and book.place(SPACES[0], 4096, KEYS[1], b"", 10) is None
    assert book.written(first, 1)
    book.pin(first.block)
    assert book.place(SPACES[0], 4096, KEYS[1], b"", 10) is None
    assert book.drop(SPACES[0], KEYS[0]) is not None
    assert book.place(SPACES[0], 4096, KEYS[1], b"", 10) is None
    book.unpin(first.block)
    assert book.place(SPACES[0], 4096, KEYS[1], b"", 10) is not None
