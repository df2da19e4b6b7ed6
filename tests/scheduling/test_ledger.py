"""The ledger: everything booked is gone when it ends, and nothing is counted twice in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.conductor.scheduling import Ask, Booking, Decision, Ledger, Scheduler, policy
from services.conductor.scheduling.agents import DISK_RATE
from services.conductor.scheduling.decodes import LiveColumns
from services.conductor.scheduling.ledger import LINGER_S
from services.conductor.scheduling.optimistic import Optimistic
from shared.blocks import KEY, chain_keys
from shared.latency import PrefillModel
from shared.messages import Load
from tests.examples import examples
from tests.scheduling.fleet import BLOCK, DECODE, PREFILL, fleet


def chain(*tokens: int) -> bytes:
    return chain_keys(b"r" * 16, np.repeat(np.array(tokens, dtype=np.uint32), BLOCK), BLOCK)


def place(
    ledger: Ledger, keys: bytes, now: float = 0.0, matches: dict[str, int] | None = None
) -> tuple[Decision, Booking]:
    ask = Ask(len(keys) // KEY * BLOCK, len(keys) // KEY, BLOCK, 1000, 8)
    decided = Scheduler(policy("global_cache")).decide(ask, ledger.view(keys, matches or {}, now), None)
    assert isinstance(decided, Decision)
    return decided, ledger.book(decided, ask, keys, now)


def test_a_burst_of_one_prompt_goes_where_it_is_computed_first() -> None:
    """Before any block of it is committed; the queue there counts what is already in it."""
    ledger = fleet()
    keys = chain(*range(50))
    first, _ = place(ledger, keys)
    second, _ = place(ledger, keys)
    assert second.prefill == first.prefill and second.prefix_blocks == 50
    view = ledger.view(keys, {}, 0.0)
    row = view.prefill.ids.index(first.prefill)
    assert view.prefill.own[row] == 50 and view.prefill.here[row] == 0
    assert view.prefill.ready[row] == pytest.approx(first.ttft)
    assert not len(view.sources.agents)  # what is only promised is never fetched from


def test_queues_decay_and_reports_do_not_count_twice() -> None:
    ledger = fleet(1, 1)
    decided, booking = place(ledger, chain(*range(100)), now=0.0)
    assert ledger.prefills.queue(0.0)[0] == pytest.approx(0.4)
    ledger.report("p0", Load(queued=1, queue_ms=400.0), 0.1)
    booking.settle_prefill()
    assert ledger.prefills.queue(0.1)[0] == pytest.approx(0.4)
    assert ledger.prefills.queue(0.3)[0] == pytest.approx(0.2)
    assert ledger.prefills.queue(9.0)[0] == 0.0
    booking.end()
    assert decided.prefill == "p0" and not ledger.open_bookings


def test_tokens_stand_in_for_an_unpredicted_queue() -> None:
    ledger = fleet(1, 1)
    ledger.report("p0", Load(queued=2, queued_tokens=500), 0.0)
    assert ledger.prefills.queue(0.0)[0] == pytest.approx(0.5)
    found = ledger.prefills.soonest(100, 0.0)
    least = PREFILL.seconds(100, 99)
    assert found and found[:2] == pytest.approx((0.5 + least, least)) and found[2] == PREFILL
    ledger.set_open("p0", False)
    assert ledger.prefills.soonest(100, 0.0) is None


def test_a_quick_instance_with_a_queue_may_be_sooner_than_a_slow_idle_one() -> None:
    ledger = fleet(2, 1)
    slow = PrefillModel(0.4, 0.0, 0.0)
    ledger.put_prefill("p0", "slow", slow)
    ledger.report("p1", Load(queued=1, queue_ms=100), 0.0)
    least = PREFILL.seconds(100, 99)
    assert least < 0.3
    found = ledger.prefills.soonest(100, 0.0)
    assert found and found[:2] == pytest.approx((0.1 + least, least)) and found[2] == PREFILL


def test_what_decode_reports_of_ours_is_not_others() -> None:
    ledger = fleet(1, 1)
    _, booking = place(ledger, chain(1, 2, 3))
    booking.prefilled(0.5)
    ledger.report("d0", Load(running=3, kv_tokens=100, total_blocks=50, room_blocks=20), 1.0)
    view = ledger.view(b"", {}, 1.0).decode
    assert view.running[0] == 2 and view.kv_tokens[0] == pytest.approx(100 - 16)
    assert view.assigned[0] == 1 and view.room[0] == 20 - 5  # 12 + 8 tokens are not in the report yet
    booking.settle_decode()
    assert ledger.view(b"", {}, 1.0).decode.room[0] == 20
    assert view.joined(0.0, 0.0).pace[0] == pytest.approx(0.01 + 0.001 * (2 + 1 + 1))


def test_what_other_conductors_reserved_counts_as_coming() -> None:
    ledger = fleet(1, 2)
    ledger.decodes.others("d0", 3, 30)
    view = ledger.view(b"", {}, 0.0, block_size=BLOCK).decode
    assert list(view.running) == [3, 0] and view.kv_tokens[0] == 120 and list(view.assigned) == [3, 0]


def test_closed_instances_are_out_of_the_question() -> None:
    ledger = fleet(2, 2)
    view = ledger.view(b"", {}, 0.0, closed=["p1", "d0", "nobody"])
    assert list(view.prefill.open) == [True, False] and list(view.decode.open) == [False, True]
    ledger.set_open("p0", False)
    ledger.set_open("p0", True)
    assert ledger.view(b"", {}, 0.0).prefill.open.all()


def test_sources_are_the_longest_then_the_least_loaded() -> None:
    ledger = fleet(6, 1)
    ledger.put_agent("a1", rate=1e6, backlog=5e6, prefill=True)
    ledger.put_agent("d-agent", rate=2e6)
    matches = {"a0": 3, "a1": 9, "a2": 9, "d-agent": 9, "a3": 1, "a4": 2, "gone": 50}
    view = ledger.view(b"", matches, 0.0).sources
    assert list(view.agents) == ["a2", "d-agent", "a1", "a0"] or list(view.agents) == ["d-agent", "a2", "a1", "a0"]
    assert list(view.blocks) == [9, 9, 9, 3] and view.backlog[2] == pytest.approx(5e6)


def test_of_equal_sources_the_one_with_the_least_on_ssd_comes_first() -> None:
    ledger = fleet(3, 1)
    ledger.put_agent("a0", rate=1e6, backlog=5e6, prefill=True)
    ledger.put_agent("a1", rate=1e6, prefill=True, disk=3e6)
    view = ledger.view(b"", {"a0": 9, "a1": 9, "a2": 9, "gone": 9}, 0.0, dram={"a1": 4, "a2": 2, "gone": 1}).sources
    assert list(view.agents) == ["a0", "a1", "a2"]
    assert list(view.dram) == [9, 4, 2] and view.disk[1] == 3e6 and view.disk[2] == DISK_RATE


def test_a_prefix_on_ssd_costs_the_time_to_read_it() -> None:
    """Read while the prompt is queued: it costs what it takes longer than the queue."""
    ledger = fleet(2, 1)
    ledger.put_agent("a0", prefill=True, disk=1e4)  # a block has 1000 bytes
    keys, ask = chain(*range(100)), Ask(400, 100, BLOCK, 1000, 8)
    scheduler = Scheduler(policy("global_cache"))

    def decide(dram: dict[str, int]) -> Decision:
        decided = scheduler.decide(ask, ledger.view(keys, {"a0": 100}, 0.0, dram=dram), None)
        assert isinstance(decided, Decision)
        return decided

    assert decide({}).prefill == "p0" and decide({}).ttft == pytest.approx(0.001)
    assert decide({"a0": 99}).prefill == "p0" and decide({"a0": 99}).ttft == pytest.approx(0.1 + 0.001)
    slow = decide({"a0": 0})  # ten seconds of reading: computing it takes less, anywhere else
    assert (slow.prefill, slow.fetch_blocks) == ("p1", 0) and slow.ttft == pytest.approx(0.4)
    ledger.report("p0", Load(queued=1, queue_ms=100.0), 0.0)
    assert decide({"a0": 99}).ttft == pytest.approx(0.1 + 0.001)  # while it is queued


def test_what_a_source_has_on_ssd_is_read_before_it_is_sent() -> None:
    ledger = fleet(1, 1)
    ledger.put_agent("src", rate=1e6, disk=1e6)
    keys = chain(*range(100))
    ask = Ask(400, 100, BLOCK, 1000, 8)
    view = ledger.view(keys, {"src": 100}, 0.0, dram={"src": 40})
    decided = Scheduler(policy("global_cache")).decide(ask, view, None)
    assert isinstance(decided, Decision) and decided.fetch_blocks == 100
    assert decided.transfer == pytest.approx(0.1 + 0.06)
    literal = Scheduler(policy("paper")).decide(ask, view, None)  # knows of one kind of store
    assert isinstance(literal, Decision) and literal.ttft == pytest.approx(0.4)  # and of prefill nodes' alone


def test_planned_fetches_load_their_source_and_their_target() -> None:
    ledger = fleet(1, 1)
    ledger.put_agent("src", rate=1e6)
    keys = chain(*range(100))
    decided, booking = place(ledger, keys, matches={"src": 100})
    assert decided.fetch_blocks == 100 and decided.sources[0] == ("src", 100)
    view = ledger.view(keys, {"src": 100}, 0.05)
    assert view.sources.backlog[0] == pytest.approx(100 * 1000) and view.prefill.inbound[0] == pytest.approx(0.05)
    assert ledger.view(keys, {"src": 100}, 5.0).sources.backlog[0] == 0.0
    booking.end()
    view = ledger.view(keys, {"src": 100}, 0.05)
    assert view.sources.backlog[0] == 0.0 and view.prefill.inbound[0] == 0.0


def test_an_instance_that_leaves_takes_its_requests_along() -> None:
    ledger = fleet(2, 3)
    bookings = [place(ledger, chain(i, i + 1))[1] for i in range(9)]
    ledger.remove("d0")
    ledger.remove("p0")
    view = ledger.view(b"", {}, 0.0)
    assert view.decode.ids == ("d1", "d2") and list(view.decode.assigned) == [3, 3] and len(view.decode.live_row) == 6
    assert np.bincount(view.decode.live_row).tolist() == [3, 3]
    ledger.put_decode("d0", DECODE)  # comes back as another incarnation
    for booking in bookings:
        booking.end()
    assert not ledger.view(b"", {}, 0.0).decode.assigned.any() and not ledger.optimistic


def test_blocks_count_on_for_a_moment_after_the_first_token() -> None:
    """The index hears of them some milliseconds later; an instance that comes back has none of them."""
    ledger, keys = fleet(2, 1), chain(1, 2)
    decision, booking = place(ledger, keys)
    booking.prefilled(1.0)
    booking.end()
    assert ledger.optimistic.match(keys)[decision.prefill][0] == 2
    ledger.view(keys, {}, 1.0 + LINGER_S)
    assert not ledger.optimistic
    decision, booking = place(ledger, keys)
    booking.prefilled(3.0)
    ledger.remove(decision.prefill)
    assert not ledger.optimistic


@given(st.data())
@settings(max_examples=examples(100))
def test_optimistic_matches_are_longest_common_prefixes(data: st.DataObject) -> None:
    optimistic = Optimistic()
    live: list[tuple[str, bytes]] = []
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    for _ in range(data.draw(st.integers(0, 12))):
        removes: bool = data.draw(st.booleans())
        if live and removes:
            optimistic.remove(*live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            entry = (data.draw(st.sampled_from("pqr")), chain(*data.draw(prompts)))
            optimistic.add(*entry, 1.0)
            live.append(entry)
    keys = chain(*data.draw(prompts))
    want: dict[str, int] = {}
    for instance, other in live:
        common = next((i for i in range(0, len(keys), KEY) if keys[i : i + KEY] != other[i : i + KEY]), len(keys))
        if common:
            want[instance] = max(want.get(instance, 0), common // KEY)
    assert {instance: blocks for instance, (blocks, _) in optimistic.match(keys).items()} == want


def test_live_columns_stay_dense() -> None:
    live = LiveColumns()
    for i in range(200):
        live.add(i, i % 3, float(i), float(i), float(i))
    for i in range(0, 200, 2):
        assert live.remove(i) and not live.remove(i)
    assert sorted(live.bookings) == list(range(1, 200, 2))
    for booking, at in live.at.items():
        assert live.joins[at] == booking and live.row[at] == booking % 3


class Bookkeeping(RuleBasedStateMachine):
    """Any order of the calls, and instances that come and go: in the end nothing is left."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = fleet(3, 3)
        self.bookings: list[Booking] = []
        self.now = 0.0

    @rule(a=st.integers(0, 3), n=st.integers(1, 5), source=st.booleans())
    def book(self, a: int, n: int, source: bool) -> None:
        keys = chain(*range(a, a + n))
        self.bookings.append(place(self.ledger, keys, self.now, {"a0": n} if source else None)[1])

    @precondition(lambda self: self.bookings)
    @rule(at=st.integers(0, 50), what=st.sampled_from(["settle_prefill", "settle_decode", "prefilled", "end"]))
    def progress(self, at: int, what: str) -> None:
        booking = self.bookings[at % len(self.bookings)]
        getattr(booking, what)(*([self.now] if what == "prefilled" else []))

    @rule(i=st.integers(0, 2), role=st.sampled_from("pd"))
    def replaced(self, i: int, role: str) -> None:
        self.ledger.remove(f"{role}{i}")
        if role == "p":
            self.ledger.put_prefill(f"p{i}", f"a{i}", PREFILL)
        else:
            self.ledger.put_decode(f"d{i}", DECODE)

    @rule(i=st.integers(0, 2), running=st.integers(0, 9), queue=st.floats(0, 1000))
    def report(self, i: int, running: int, queue: float) -> None:
        self.now += 0.1
        self.ledger.report(f"d{i}", Load(running=running, total_blocks=1000, room_blocks=900), self.now)
        self.ledger.report(f"p{i}", Load(queue_ms=queue), self.now)

    @invariant()
    def columns_agree(self) -> None:
        view = self.ledger.view(chain(0), {}, self.now)
        counted: Any = np.bincount(view.decode.live_row, minlength=3)
        assert list(counted) == list(view.decode.assigned) and (view.prefill.queue >= 0).all()

    def teardown(self) -> None:
        for booking in self.bookings:
            booking.end()
            booking.end()
        self.now += LINGER_S
        for id in ("p0", "p1", "p2"):
            self.ledger.report(id, Load(), self.now)
        view = self.ledger.view(chain(0), {}, self.now)
        assert not self.ledger.open_bookings and not self.ledger.optimistic and not len(self.ledger.decodes.live)
        assert not view.prefill.queue.any() and not view.prefill.inbound.any() and not view.decode.assigned.any()
        assert all(not seat.unsettled for seat in self.ledger.decodes.seats.values())
        assert all(not seat.planned for seat in self.ledger.agents.seats.values())


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=examples(30), stateful_step_count=25, deadline=None)


def test_what_ended_has_room_again_before_the_next_report() -> None:
    """An idle instance whose last report still counts a request that is over must not answer the next one with 429."""
    ledger = fleet(1, 1)
    ledger.report("d0", Load(total_blocks=64, room_blocks=60), 0.0)
    _, booking = place(ledger, chain(*range(50)))
    ledger.report("d0", Load(total_blocks=64, room_blocks=8, running=1), 1.0)
    booking.settle_decode()
    assert ledger.view(b"", {}, 1.0).decode.room[0] == 8
    booking.end()
    assert ledger.view(b"", {}, 1.0).decode.room[0] == 60
    ledger.report("d0", Load(total_blocks=64, room_blocks=58), 2.0)
    assert ledger.view(b"", {}, 2.0).decode.room[0] == 58  # the instance has the last word
