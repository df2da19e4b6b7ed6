"""The table of attempts: tombstones, live lists, silence; with lists late, repeated, lost and reordered."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shared.errors import Refused, Tombstoned
from shared.instance.attempts import KEEP_S, AttemptTable, LinkClock, Phase
from shared.messages import Ref
from tests.examples import examples

G = Ref("g", 1)
H = Ref("h", 1)
A = ("a", 1)


def table_with(*keys: tuple[str, int], lists: int = 0) -> AttemptTable:
    table = AttemptTable()
    for key in keys:
        assert table.accept(key, G, Phase.QUEUED, lists, 0.0)
    return table


def test_accept_is_idempotent() -> None:
    table = table_with(A)
    assert not table.accept(A, G, Phase.QUEUED, 0, 1.0)
    assert (len(table), table.phase(A)) == (1, Phase.QUEUED)


def test_request_of_another_gateway_is_refused() -> None:
    with pytest.raises(Refused, match="another gateway"):
        table_with(A).accept(A, H, Phase.QUEUED, 0, 1.0)


def test_dropped_attempts_never_come_back() -> None:
    table = table_with(A)
    assert table.drop(A, G, 1.0)
    assert not table.drop(A, G, 1.0)
    with pytest.raises(Tombstoned):
        table.accept(A, G, Phase.QUEUED, 0, 2.0)
    table.move(A, Phase.HOLD)
    assert (table.phase(A), len(table)) == (Phase.DROPPED, 0)


def test_cancel_of_an_unknown_attempt_leaves_a_tombstone() -> None:
    table = AttemptTable()
    assert not table.drop(A, G, 0.0)
    with pytest.raises(Tombstoned):
        table.accept(A, G, Phase.ADMITTED, 0, 1.0)


def test_what_finished_stays_finished() -> None:
    table = table_with(A)
    assert table.finish(A, 1.0)
    assert not table.drop(A, G, 2.0)
    assert not table.accept(A, G, Phase.QUEUED, 0, 3.0)
    assert table.phase(A) is Phase.DONE


def test_an_end_heard_of_first_is_the_end() -> None:
    table = AttemptTable()
    assert not table.conclude(A, 0.0)
    assert not table.accept(A, G, Phase.ADMITTED, 0, 1.0)
    assert table.phase(A) is Phase.DONE
    held = table_with(A)
    assert held.conclude(A, 1.0)


def test_three_lists_without_it_drop() -> None:
    table = table_with(A, lists=4)
    for number in (2, 3, 4):  # sent before the submit: they say nothing
        assert table.listed(G, number, [], 0.0).dropped == []
    assert table.listed(G, 5, [], 0.0).dropped == []
    assert table.listed(G, 6, [("a", 1, False)], 0.0).dropped == []
    assert [table.listed(G, n, [], 0.0).dropped for n in (7, 7, 8, 8, 9)] == [[], [], [], [], [A]]


def test_lists_of_another_gateway_do_not_count() -> None:
    table = table_with(A)
    for number in range(1, 9):
        assert table.listed(H, number, [], 0.0).dropped == []


def test_the_gateway_itself_says_from_where_to_count() -> None:
    table = table_with(A, lists=100)
    table.count_from(A, 2)
    assert [table.listed(G, n, [], 0.0).dropped for n in (3, 4, 5)] == [[], [], [A]]


def test_unknown_are_accepted_ones_that_are_not_known() -> None:
    table = table_with(("held", 1), ("done", 1), ("cancelled", 1))
    table.finish(("done", 1), 0.0)
    table.drop(("cancelled", 1), G, 0.0)
    names = ["held", "done", "cancelled", "never"]
    outcome = table.listed(G, 1, [(n, 1, True) for n in names] + [("sent", 1, False)], 0.0)
    assert outcome.unknown == [("cancelled", 1), ("never", 1)]


def tick_until(table: AttemptTable, start: float, stop: float) -> list[tuple[str, int]]:
    dropped = []
    for i in range(round((stop - start) * 10)):
        dropped += table.tick(start + i / 10)
    return dropped


def test_silence_drops() -> None:
    table = table_with(A)
    assert tick_until(table, 0.0, 2.9) == []
    table.listed(G, 1, [("a", 1, True)], 2.9)
    assert tick_until(table, 2.9, 5.8) == []
    assert tick_until(table, 5.8, 6.2) == [A]


def test_a_repeated_list_is_no_sign_of_life() -> None:
    table = table_with(A)
    dropped = []
    for i in range(40):
        table.listed(G, 1, [("a", 1, True)], i / 10)
        dropped += table.tick(i / 10)
    assert dropped == [A]


def test_the_clock_stands_still_without_a_connection_and_while_stopped() -> None:
    table = table_with(A)
    tick_until(table, 0.0, 1.0)
    table.clock.link(False, 1.0)
    assert tick_until(table, 1.0, 60.0) == []
    table.clock.link(True, 60.0)
    assert table.tick(1000.0) == []  # stopped for minutes: one look moves the clock by half a second
    assert tick_until(table, 1000.0, 1001.0) == []
    assert tick_until(table, 1001.0, 1002.0) == [A]


def test_link_clock_never_runs_back() -> None:
    clock = LinkClock()
    assert [clock.look(t) for t in (5.0, 5.2, 5.1, 9.0)] == pytest.approx([0, 0.2, 0.2, 0.7])


def test_ended_attempts_are_forgotten_in_the_end() -> None:
    table = table_with(A)
    table.drop(A, G, 10.0)
    table.tick(10.0 + KEEP_S)
    assert table.phase(A) is Phase.DROPPED
    table.tick(10.1 + KEEP_S)
    assert table.phase(A) is None


def test_what_is_listed_is_not_forgotten() -> None:
    """Its reader is slow: it still asks for outputs of an attempt that ended long ago."""
    table = table_with(A)
    table.finish(A, 10.0)
    for number in range(1, 10):
        table.listed(G, number, [(*A, True)], 10.0 + 60.0 * number)
        table.tick(10.0 + 60.0 * number + 1.0)
    assert table.phase(A) is Phase.DONE
    table.tick(10.0 + 60.0 * 9 + KEEP_S + 0.1)
    assert table.phase(A) is None


class LiveListMachine(RuleBasedStateMachine):
    """The model of the live list, on the real table: any list sent may come at any time, again, or never."""

    @initialize()
    def begin(self) -> None:
        self.table = AttemptTable()
        self.sent: list[bool] = []
        self.state, self.base, self.ended_at = "-", 0, 0

    @rule()
    def gateway_sends_a_list(self) -> None:
        self.sent.append(self.state in ("sent", "accepted"))

    @precondition(lambda self: self.state == "-")
    @rule()
    def gateway_submits(self) -> None:
        self.state, self.base = "sent", len(self.sent)

    @precondition(lambda self: self.state == "accepted")
    @rule()
    def gateway_ends_it(self) -> None:
        self.state, self.ended_at = "ended", len(self.sent)

    @precondition(lambda self: self.state == "sent")
    @rule()
    def instance_accepts(self) -> None:
        self.table.accept(A, G, Phase.QUEUED, self.base, 0.0)
        self.state = "accepted"

    @precondition(lambda self: bool(self.sent))
    @rule(data=st.data())
    def a_list_comes(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, len(self.sent)))
        self.deliver(number)
        if self.state == "accepted":
            assert self.table.phase(A) is Phase.QUEUED, "dropped what the gateway never ended"

    def deliver(self, number: int) -> None:
        listed = [("a", 1, True)] if self.sent[number - 1] else []
        self.table.listed(G, number, listed, 0.0)

    def teardown(self) -> None:
        """Three more lists after its end drop it, whatever came before."""
        if getattr(self, "state", "-") == "ended":
            for _ in range(3):
                self.sent.append(False)
                self.deliver(len(self.sent))
            assert self.table.phase(A) is Phase.DROPPED


TestLiveList = LiveListMachine.TestCase
TestLiveList.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)
