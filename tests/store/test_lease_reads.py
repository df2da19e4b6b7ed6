"""Reads under leases while the owner evicts and writes anew: pool, pins and lease table together (model m1_lease)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.leases import Borrowed, Lease, LeaseTable
from services.store.pins import Pins
from services.store.pool import Pool
from shared.engines.base import Held, Owner, PoolClass
from shared.errors import StaleGeneration
from shared.messages import Ref
from tests.examples import examples

TTL = 4.0
CHUNKS = 2
OWNER, READER = Owner("writer"), Ref("reader", 1)


@dataclass
class Read:
    """One read of ``key``: over shm chunk by chunk, then the generation; over TCP under a pin of the server's."""

    key: bytes
    slot: int
    generation: int
    borrowed: Borrowed
    tcp: bool
    got: list[bytes | None] = field(default_factory=lambda: [None] * CHUNKS)
    pin: ExitStack | None = None


class ReadMachine(RuleBasedStateMachine):
    """The reader's clock may stand still as long as it likes (a paused machine): then the generation alone protects.
    A lease that was granted may be lost on its way, or given back at any time."""

    @initialize(slots=st.integers(1, 2))
    def start(self, slots: int) -> None:
        self.pins = Pins(slots)
        self.pool = Pool(slots, self.pins.claim)
        self.table = LeaseTable(TTL, limit=4)
        self.memory: list[list[bytes]] = [[b""] * CHUNKS for _ in range(slots)]
        self.owner_now = self.reader_now = 100.0
        self.writing: list[Held] = []
        self.reads: list[Read] = []
        self.leases: list[Lease] = []

    # -- the owner -------------------------------------------------------------------------------------

    @precondition(lambda self: not self.writing)
    @rule(key=st.sampled_from([b"K" * 16, b"L" * 16, b"M" * 16]))
    def reserve(self, key: bytes) -> None:
        """Evicts what it takes: never what is leased (owner_waits) or being copied (pin)."""
        before = [self.pins.generation(slot) for slot in range(len(self.memory))]
        held = self.pool.reserve([key], 1, OWNER, PoolClass.CACHE)
        for h in held or ():
            if h.slot >= 0 and h.key not in self.pool.slots.by_key:
                assert self.pins.generation(h.slot) > before[h.slot]  # bump_first
                assert not any(read.pin is not None and read.slot == h.slot for read in self.reads)
                assert not any(h.slot in lease.slots for lease in self.leases if lease.until > self.owner_now)
                self.writing.append(h)
            elif h.hold:
                self.pool.release(1, [h.hold])

    @precondition(lambda self: self.writing)
    @rule(chunk=st.integers(0, CHUNKS - 1))
    def write(self, chunk: int) -> None:
        self.memory[self.writing[0].slot][chunk] = self.writing[0].key

    @precondition(lambda self: self.writing)
    @rule(abort=st.booleans())
    def finish(self, abort: bool) -> None:
        held = self.writing.pop()
        if not abort:
            self.memory[held.slot] = [held.key] * CHUNKS
            self.pool.commit(1, [held.hold], b"", [held.key], [8])
        self.pool.release(1, [held.hold])

    @rule(key=st.sampled_from([b"K" * 16, b"L" * 16]))
    def remove(self, key: bytes) -> None:
        self.pool.remove(key)

    @rule(seconds=st.floats(0.1, 6.0), reader=st.booleans())
    def time_passes(self, seconds: float, reader: bool) -> None:
        self.owner_now += seconds
        self.reader_now += seconds if reader else 0.0
        for slot in self.table.expire(self.owner_now):
            self.pool.unuse(slot)

    # -- the reader ------------------------------------------------------------------------------------

    @rule(key=st.sampled_from([b"K" * 16, b"L" * 16]), tcp=st.booleans(), lost=st.booleans())
    def lease(self, key: bytes, tcp: bool, lost: bool) -> None:
        slot = self.pool.find(key)
        if slot is None or len(self.table) >= 4:
            return
        lease = self.table.grant(self.owner_now, READER, [slot], 8)
        self.leases.append(lease)
        self.pool.use(slot)
        if not lost:
            borrowed = Borrowed(lease.id, TTL, self.reader_now)
            self.reads.append(Read(key, slot, self.pins.generation(slot), borrowed, tcp))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Early, while bytes are still under way: the owner may reuse the slot."""
        read = data.draw(st.sampled_from(self.reads))
        for slot in self.table.release(read.borrowed.id, READER):
            self.pool.unuse(slot)
        self.leases = [lease for lease in self.leases if lease.id != read.borrowed.id]

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), chunk=st.integers(0, CHUNKS - 1))
    def copy(self, data: st.DataObject, chunk: int) -> None:
        read = data.draw(st.sampled_from(self.reads))
        if read.tcp and read.pin is None:
            stack = ExitStack()
            try:
                stack.enter_context(self.pins.pin(read.slot, read.generation))  # pin_first
            except StaleGeneration:
                self.reads.remove(read)
                return
            read.pin = stack
        read.got[chunk] = self.memory[read.slot][chunk]

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.reads))
        if None in read.got:
            return
        self.reads.remove(read)
        if read.pin is not None:
            read.pin.close()
        same = read.tcp or self.pins.generation(read.slot) == read.generation  # gen_last
        if same and read.borrowed.valid(self.reader_now):  # discard
            assert read.got == [read.key] * CHUNKS, "a read reported good has other bytes"

    @invariant()
    def what_is_leased_is_kept(self) -> None:
        if hasattr(self, "pool"):
            for lease in self.leases:
                if lease.until > self.owner_now:
                    assert all(self.pool.slots[slot].uses for slot in lease.slots)

    def teardown(self) -> None:
        """Whatever happened, the slots are reused in the end."""
        if not hasattr(self, "pool"):
            return
        for read in self.reads:
            if read.pin is not None:
                read.pin.close()
        for held in self.writing:
            self.pool.release(1, [held.hold])
        for slot in self.table.expire(self.owner_now + 10 * TTL):
            self.pool.unuse(slot)
        self.pool.slots.evict(len(self.memory))
        assert self.pool.slots.free == len(self.memory)
        assert self.pool.allocate(len(self.memory), 1, OWNER, PoolClass.GROWTH) is not None


ReadMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestReadMachine = ReadMachine.TestCase
