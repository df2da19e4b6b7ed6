"""Who gives way in a small pool: requests of one node after model m5_pool, and the table of who may abort whom."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.pool import Pool
from services.store.preemption import PATIENCE, Preemption, Victim
from services.store.waiting import Line, Want
from shared.engines.base import Held, Owner, PoolClass
from shared.errors import DoesNotFit
from tests.examples import examples

AGENT = 0
PROMPT = 2
G, L, P, F, C = PoolClass.GROWTH, PoolClass.LANDING, PoolClass.PREFILL, PoolClass.PREFETCH, PoolClass.CACHE


@dataclass(eq=False)
class Life:
    """A request: queued, then ``prefill`` (blocks one by one), ``wait`` (for the landing, whole), ``run``, ``done``."""

    number: int
    growth: int
    phase: str = "queued"
    work: list[Held] = field(default_factory=list)
    land: list[Held] = field(default_factory=list)
    want: Want | None = None
    stopped: bool = False
    told: bool = False
    starts: int = 0

    @property
    def owner(self) -> Owner:
        """A retry is another attempt, of the same age (rule: age_kept)."""
        return Owner(f"{self.number}/{self.starts}", float(self.number))

    @property
    def connection(self) -> int:
        return 1 + self.number

    @property
    def needs(self) -> tuple[int, PoolClass] | None:
        """Slots that it asks for now."""
        if self.phase == "prefill" and len(self.work) < PROMPT:
            return 1, P
        if self.phase == "wait":
            return PROMPT, L
        if self.phase == "run" and len(self.land) < PROMPT + self.growth:
            return 1, G
        return None


class NodeMachine(RuleBasedStateMachine):
    """Three requests and their one pool, as the slab drives pool, line and preemption; engines stop and go on; what is
    aborted comes free when its engine has heard of it, a landing's slots when they are drained."""

    @initialize(slots=st.integers(5, 8), growth=st.lists(st.integers(1, 2), min_size=3, max_size=3))
    def start(self, slots: int, growth: list[int]) -> None:
        self.now = 0.0
        self.pool = Pool(slots, lambda slot: True, headroom=1)
        self.line = Line()
        self.preemption = Preemption(self.pool, AGENT)
        self.lives = [Life(i, n) for i, n in enumerate(growth)]
        self.quarantine: list[Held] = []

    def life(self, owner: str) -> Life:
        return self.lives[int(owner.split("/")[0])]

    # -- what the slab does ----------------------------------------------------------------------------

    def ask(self, life: Life) -> None:
        needs = life.needs
        if needs is not None and life.want is None and not life.stopped:
            life.want = self.line.want(needs[0], life.owner, needs[1])
            self.line.join(life.want)

    def serve(self) -> None:
        unmet: list[Want] = []
        for want in self.line:
            life = self.life(want.owner)
            held = self.pool.allocate(
                want.slots, life.connection, life.owner, want.pool_class, self.line.kept_from(want)
            )
            if held is None:
                unmet.append(want)
                continue
            self.line.leave(want)
            life.want = None
            (life.work if want.pool_class is P else life.land).extend(held)
        if unmet:
            for victim in self.preemption.choose(self.now, unmet[0], self.line.kept_from(unmet[0])):
                self.abort(victim, unmet[0])

    def abort(self, victim: Victim, want: Want) -> None:
        life, asker = self.life(victim.owner.id), self.life(want.owner)
        assert life is not asker
        if want.pool_class is G:
            assert life.phase != "run" or life.number > asker.number  # growth_first, only_younger
        else:
            assert life.phase in ("prefill", "wait") and life.number > asker.number  # class_order, only_younger
        assert not life.told, "aborted twice in vain"
        life.told = True

    # -- moves -----------------------------------------------------------------------------------------

    @rule(i=st.integers(0, 2))
    def goes_on(self, i: int) -> None:
        """The next thing that this request can do."""
        life = self.lives[i]
        if life.stopped:
            return
        if life.told:
            self.over(life)
        elif life.phase == "queued":
            life.phase, life.starts = "prefill", life.starts + 1
        elif life.phase == "prefill" and len(life.work) == PROMPT:
            life.phase = "wait"
        elif life.phase == "wait" and life.land:
            self.pool.release(life.connection, [h.hold for h in life.work])
            self.pool.runs(life.connection, life.owner.id)
            life.phase, life.work = "run", []
            assert all(h.pool_class is G for h in self.pool.held_by_owner(life.connection, life.owner.id))
        elif life.phase == "run" and len(life.land) == PROMPT + life.growth:
            self.pool.release(life.connection, [h.hold for h in life.land])
            life.phase, life.land = "done", []
        self.ask(life)
        self.serve()

    def over(self, life: Life) -> None:
        """Its engine has heard that it has to give way: it begins again."""
        if life.want is not None:
            self.line.leave(life.want)
        self.pool.release(life.connection, [h.hold for h in life.work])
        self.pool.hand_over(life.connection, [h.hold for h in life.land], AGENT)
        self.quarantine += life.land
        life.phase, life.work, life.land, life.want, life.told = "queued", [], [], None, False

    @rule()
    def drained(self) -> None:
        """rule: quarantine_ends."""
        self.pool.release(AGENT, [h.hold for h in self.quarantine])
        self.quarantine = []
        self.serve()

    @rule(i=st.integers(0, 2))
    def prefetches(self, i: int) -> None:
        life = self.lives[i]
        if life.phase != "queued" or life.stopped:
            return
        held = self.pool.allocate(1, life.connection, life.owner, F)
        if held is not None:
            key = bytes([i, len(self.pool.slots.by_key)]) * 8
            if key not in self.pool.slots.by_key:
                self.pool.commit(life.connection, [held[0].hold], b"", [key], [8])
            self.pool.release(life.connection, [h.hold for h in held])

    @rule(i=st.integers(0, 2), stopped=st.booleans())
    def stops(self, i: int, stopped: bool) -> None:
        self.lives[i].stopped = stopped

    @precondition(lambda self: self.line)
    @rule(seconds=st.floats(0.1, 2 * PATIENCE))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nobody_has_what_is_not_there(self) -> None:
        if hasattr(self, "pool"):
            held = [h.slot for life in self.lives for h in (*life.work, *life.land)] + [h.slot for h in self.quarantine]
            assert len(held) == len(set(held)) <= len(self.pool.slots)

    def teardown(self) -> None:
        """Nobody stops any more: all end, whatever had happened."""
        if not hasattr(self, "pool"):
            return
        for life in self.lives:
            life.stopped = False
        for _ in range(200):
            if all(life.phase == "done" for life in self.lives):
                break
            self.now += PATIENCE
            self.drained()
            for life in self.lives:
                self.self_preempts(life)
                self.goes_on(life.number)
        assert all(life.phase == "done" for life in self.lives), "deadlock"
        self.drained()
        assert not self.pool.holds and self.pool.slots.used == 0

    def self_preempts(self, life: Life) -> None:
        """rule: self. Growth that waits in vain is decode's to end."""
        if (
            life.phase == "run"
            and life.want is not None
            and not any(x.told for x in self.lives)
            and not self.quarantine
        ):
            life.told = True


NodeMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestNodeMachine = NodeMachine.TestCase


# -- the table ---------------------------------------------------------------------------------------------


def hold(pool: Pool, number: int, pool_class: PoolClass, slots: int = 2) -> None:
    held = pool.allocate(slots, number, Owner(f"{number}/1", float(number)), pool_class)
    assert held is not None


def chosen(pool: Pool, age: int, pool_class: PoolClass, slots: int = 1, now: float = 0.0) -> list[int]:
    line = Line()
    want = line.want(slots, Owner(f"{age}/1", float(age)), pool_class)
    return [victim.connection for victim in Preemption(pool, AGENT).choose(now, want, 0)]


@pytest.mark.parametrize(
    ("asker", "holders", "victims"),
    [
        ((5, L), [(6, P), (7, L), (8, G)], [7]),  # the youngest that is not running
        ((5, L), [(4, P), (3, L), (8, G)], []),  # neither older ones nor running ones
        ((5, P), [(6, C), (7, C), (4, G)], []),  # what is being put ends by itself
        ((9, G), [(6, P), (3, L), (8, G)], [6]),  # growth: also older ones that do not run
        ((5, G), [(6, G), (7, G), (3, G)], [7]),  # and younger ones that do
        ((9, G), [(6, G), (7, G), (3, G)], []),  # itself: decode's part
        ((5, F), [(6, P), (7, P), (8, P)], []),
        ((5, C), [(6, P), (7, P), (8, P)], []),
    ],
)
def test_who_gives_way(asker: tuple[int, PoolClass], holders: list[tuple[int, PoolClass]], victims: list[int]) -> None:
    pool = Pool(6, lambda slot: True)
    for number, pool_class in holders:
        hold(pool, number, pool_class)
    assert chosen(pool, *asker) == victims


def test_no_more_than_it_takes_and_nobody_in_vain() -> None:
    pool = Pool(6, lambda slot: True)
    for number in (6, 7, 8):
        hold(pool, number, P)
    assert chosen(pool, 5, L, slots=3) == [8, 7]
    assert chosen(pool, 7, L, slots=3) == []  # one alone would not do
    line, preemption = Line(), Preemption(pool, AGENT)
    want = line.want(2, Owner("5/1", 5.0), L)
    assert [v.connection for v in preemption.choose(0.0, want, 0)] == [8]
    assert preemption.choose(PATIENCE / 2, want, 0) == []  # it is coming
    assert [v.connection for v in preemption.choose(PATIENCE, want, 0)] == [7]  # 8 is stopped, it seems
    pool.drop(8)
    assert preemption.choose(PATIENCE, want, 0) == []


def test_neither_the_same_request_nor_a_fetch_under_way_nor_shared_blocks() -> None:
    pool = Pool(4, lambda slot: True)
    owner = Owner("7/1", 7.0)
    pool.allocate(1, 3, owner, P)
    pool.allocate(1, AGENT, Owner("8/1", 8.0), L)  # dest_held
    keys = [b"a" * 16, b"b" * 16]
    held = pool.reserve(keys, 4, Owner("9/1", 9.0), P)
    assert held is not None
    pool.commit(4, [h.hold for h in held], b"", keys, [8, 8])
    pool.lease(keys, 5, Owner("1/1", 1.0))
    want = Line().want(1, owner, L)
    assert Preemption(pool, AGENT).choose(0.0, want, 0) == []


def test_what_never_fits_is_refused_at_once() -> None:
    """rule: fits."""
    pool = Pool(4, lambda slot: True, headroom=1)
    with pytest.raises(DoesNotFit):
        pool.allocate(4, 1, Owner("1/1"), L)
