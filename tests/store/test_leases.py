"""Remote leases: reader and owner with drifting clocks, messages lost, repeated and late (model m1_lease)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.leases import KEEP, Borrowed, Lease, LeaseTable
from shared.errors import Contended
from shared.messages import Ref
from tests.examples import examples

READER = Ref("reader", 1)
TTL = 4.0


class LeaseMachine(RuleBasedStateMachine):
    """One lease. The reader's clock may be up to one part in five slower than the owner's (``drift``)."""

    @initialize()
    def ask(self) -> None:
        self.owner_now = 100.0
        self.reader_now = 7.0
        self.sent = self.reader_now
        self.table = LeaseTable(TTL, limit=4)
        self.lease: Lease | None = None
        self.borrowed: Borrowed | None = None
        self.renewals: list[tuple[float, int]] = []  # (sent, lease id) on the way to the owner, perhaps for ever
        self.renewed: list[float] = []  # answers on the way back
        self.released = False

    @rule(seconds=st.floats(0.01, 3.0), slow=st.floats(0.8, 1.0))
    def time_passes(self, seconds: float, slow: float) -> None:
        self.owner_now += seconds
        self.reader_now += seconds * slow
        self.table.expire(self.owner_now)

    @precondition(lambda self: self.lease is None)
    @rule()
    def owner_grants(self) -> None:
        self.lease = self.table.grant(self.owner_now, READER, [3, 4], 100)

    @precondition(lambda self: self.lease is not None and self.borrowed is None)
    @rule()
    def reader_learns(self) -> None:
        assert self.lease is not None
        self.borrowed = Borrowed(self.lease.id, TTL, self.sent)  # rule: from_send

    @precondition(lambda self: self.borrowed is not None)
    @rule()
    def reader_asks_for_more(self) -> None:
        assert self.borrowed is not None
        self.renewals.append((self.reader_now, self.borrowed.id))

    @precondition(lambda self: self.renewals)
    @rule(data=st.data(), keep=st.booleans())
    def owner_renews(self, data: st.DataObject, keep: bool) -> None:
        """Late, twice, in any order."""
        entry = data.draw(st.sampled_from(self.renewals))
        if not keep:
            self.renewals.remove(entry)
        if self.table.renew(self.owner_now, entry[1], READER):
            self.renewed.append(entry[0])

    @precondition(lambda self: self.renewed)
    @rule(data=st.data())
    def reader_is_renewed(self, data: st.DataObject) -> None:
        assert self.borrowed is not None
        self.borrowed.renewed(data.draw(st.sampled_from(self.renewed)))

    @precondition(lambda self: self.lease is not None and not self.released)
    @rule()
    def a_stranger_changes_nothing(self) -> None:
        assert self.lease is not None
        stranger = Ref("stranger", 1)
        assert not self.table.renew(self.owner_now, self.lease.id, stranger)
        assert self.table.release(self.lease.id, stranger) == []

    @invariant()
    def while_the_reader_believes_the_owner_keeps(self) -> None:
        borrowed: Borrowed | None = getattr(self, "borrowed", None)
        if borrowed is not None and not self.released and borrowed.valid(self.reader_now):
            assert len(self.table) == 1, "the owner let go before the reader's end"

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.expire(self.owner_now + KEEP * TTL + 0.01)
            assert len(self.table) == 0


LeaseMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase


def test_a_lease_ends_by_time_and_cannot_be_renewed_after() -> None:
    table = LeaseTable(TTL, limit=4)
    lease = table.grant(10.0, READER, [1, 2], 64)
    assert table.expire(10.0 + KEEP * TTL - 0.01) == []
    assert table.renew(14.0, lease.id, READER)
    assert table.expire(15.1) == []
    assert table.expire(14.0 + KEEP * TTL) == [1, 2]
    assert not table.renew(19.1, lease.id, READER)
    assert table.release(lease.id, READER) == []


def test_an_expired_lease_that_was_not_swept_yet_is_not_renewed() -> None:
    table = LeaseTable(TTL, limit=4)
    lease = table.grant(10.0, READER, [1], 64)
    assert not table.renew(10.0 + KEEP * TTL, lease.id, READER)
    assert table.expire(10.0 + KEEP * TTL) == [1]


def test_release_gives_the_slots_once() -> None:
    table = LeaseTable(TTL, limit=4)
    lease = table.grant(0.0, READER, [5], 10)
    assert table.bytes == 10
    assert table.release(lease.id, READER) == [5]
    assert table.release(lease.id, READER) == []
    assert table.bytes == 0


def test_readers_over_the_limit_are_told_when_to_come_back() -> None:
    table = LeaseTable(TTL, limit=1)
    table.grant(0.0, READER, [1], 1)
    with pytest.raises(Contended) as refused:
        table.grant(0.0, READER, [2], 1)
    assert refused.value.retry_after_ms > 0


def test_the_reader_counts_from_before_it_asked_and_renews_at_half_life() -> None:
    borrowed = Borrowed(1, TTL, sent=100.0)
    assert (borrowed.renew_at, borrowed.until) == (102.0, 104.0)
    borrowed.renewed(102.0)
    assert borrowed.valid(105.9) and not borrowed.valid(106.0)
    borrowed.renewed(101.0)  # a late answer to an earlier renewal
    assert borrowed.until == 106.0
