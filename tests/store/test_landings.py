"""Landings: reports lost, repeated, late, for other attempts; fences; the grants that receivers ask (m2_landing)."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.landings import LandingTable, Span
from services.store.moves import RunTuple, check_run, moves_of
from services.store.pins import Pins, WriteGrants
from shared.blocks import Geometry
from shared.errors import Fenced, InvalidInput, MooncakeError, NotPermitted, StaleGeneration
from shared.messages import Ref
from tests.examples import examples

G = Geometry(layers=3, block_size=4, kv_heads=1, head_dim=1, dtype="float32")
P, Q = Ref("p", 1), Ref("q", 1)
ALL: list[Span] = [(b, 0, 3, 0, 4) for b in range(3)]


class LandingMachine(RuleBasedStateMachine):
    """Two attempts, each with its landing, of 10 tokens in 3 blocks; block 0 is kept here, block 1 fetched apart.
    Receivers enter and leave at any time; reports may be for either attempt and come again."""

    @initialize()
    def open(self) -> None:
        self.table = LandingTable()
        self.grants = WriteGrants()
        self.landings = []
        self.landed: dict[int, set[tuple[int, int, int]]] = {}
        self.owed: dict[int, set[int]] = {}
        self.fenced: set[int] = set()
        self.idle: set[int] = set()
        self.receiving: list[tuple[int, ExitStack]] = []
        for attempt in range(2):
            slots = [3 * attempt + i for i in range(3)]
            landing = self.table.open(1, P, 10, slots, slots, frozenset({0}), frozenset({1}), G)
            self.grants.open(landing.token, P, [slots[block] for block in landing.owed])
            self.landings.append(landing)
            self.landed[landing.token] = set()
            self.owed[landing.token] = {2}

    def cells(self, token: int) -> set[tuple[int, int, int]]:
        tokens = {0: 4, 1: 4, 2: 2}
        return {(b, layer, t) for b in self.owed[token] for layer in range(3) for t in range(tokens[b])}

    @rule(i=st.integers(0, 1), block=st.integers(0, 2), layers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
          tokens=st.tuples(st.integers(0, 4), st.integers(0, 4)), writer=st.sampled_from([P, P, P, Q]))  # fmt: skip
    def report(self, i: int, block: int, layers: tuple[int, int], tokens: tuple[int, int], writer: Ref) -> None:
        token = self.landings[i].token
        (l0, l1), (t0, t1) = sorted(layers), sorted(tokens)
        span = (block, l0, l1, t0, t1)
        try:
            self.table.report(token, writer, [span])
        except Fenced:
            assert token in self.fenced
        except NotPermitted:
            assert writer == Q or block not in self.owed[token]
        else:
            assert token not in self.fenced and writer == P
            self.landed[token] |= {(block, layer, t) for layer in range(l0, l1) for t in range(t0, t1)}

    @rule(i=st.integers(0, 1))
    def owe(self, i: int) -> None:
        """The own fetch failed."""
        landing = self.landings[i]
        if landing.token not in self.fenced:
            self.grants.widen(landing.token, landing.owe([1]))
            self.owed[landing.token].add(1)

    @rule(i=st.integers(0, 1), block=st.integers(0, 2))
    def receive(self, i: int, block: int) -> None:
        landing, stack = self.landings[i], ExitStack()
        try:
            stack.enter_context(self.grants.write(landing.token, P, [landing.slots[block]]))
        except Fenced:
            assert landing.token in self.fenced
        except NotPermitted:
            assert block not in self.owed[landing.token]
        else:
            assert landing.token not in self.fenced and block in self.owed[landing.token]
            self.receiving.append((landing.token, stack))

    @precondition(lambda self: self.receiving)
    @rule(data=st.data())
    def received(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.receiving))
        self.receiving.remove(entry)
        entry[1].close()

    @rule(i=st.integers(0, 1))
    def fence(self, i: int) -> None:
        token = self.landings[i].token
        first = self.table.quarantine(token)
        assert (first is not None) == (token not in self.fenced)
        if first is not None:
            self.fenced.add(token)
            self.grants.close(token, lambda: self.idle.add(token))

    @invariant()
    def complete_exactly_when_all_that_is_owed_is_there(self) -> None:
        for landing in getattr(self, "landings", ()):
            missing = self.cells(landing.token) - self.landed[landing.token]
            assert landing.complete == (not missing)
            assert landing.missing == len(missing)

    @invariant()
    def quarantine_ends_only_after_our_receivers(self) -> None:
        busy = {token for token, _ in getattr(self, "receiving", ())}
        for token in getattr(self, "fenced", ()):
            assert (token in self.idle) == (token not in busy)

    @invariant()
    def a_fenced_landing_is_not_named_in_handshakes(self) -> None:
        if hasattr(self, "grants"):
            assert set(self.grants.tokens(P)) == {x.token for x in self.landings} - self.fenced
            assert self.grants.tokens(Q) == []

    def teardown(self) -> None:
        for _, stack in getattr(self, "receiving", ()):
            stack.close()


LandingMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestLandingMachine = LandingMachine.TestCase


def test_keep_needs_everything_and_then_the_token_is_over() -> None:
    table = LandingTable()
    landing = table.open(1, P, 12, [0, 1, 2], [7, 8, 9], frozenset(), frozenset(), G)
    with pytest.raises(InvalidInput):
        table.keep(landing.token)
    table.report(landing.token, P, ALL)
    assert table.keep(landing.token) is landing
    with pytest.raises(Fenced):
        table.report(landing.token, P, ALL)
    with pytest.raises(Fenced):
        table.keep(landing.token)
    assert table.quarantine(landing.token) is None and len(table) == 0


def test_a_report_counts_only_for_the_attempt_it_names() -> None:
    table = LandingTable()
    first = table.open(1, P, 12, [0, 1, 2], [7, 8, 9], frozenset(), frozenset(), G)
    assert table.quarantine(first.token) is first
    second = table.open(1, P, 12, [0, 1, 2], [7, 8, 9], frozenset(), frozenset(), G)
    with pytest.raises(Fenced):
        table.report(first.token, P, ALL)
    assert second.missing == 12 * 3
    assert table.quarantined == 3
    assert table.end(first.token) is first and table.end(first.token) is None


def test_a_bad_span_refuses_the_whole_report() -> None:
    table = LandingTable()
    landing = table.open(1, P, 12, [0, 1, 2], [7, 8, 9], frozenset({1}), frozenset(), G)
    for bad in ((1, 0, 3, 0, 4), (3, 0, 3, 0, 4), (-1, 0, 3, 0, 4), (0, 0, 4, 0, 4), (0, 2, 1, 0, 4), (0, 0, 3, 0, 5)):
        with pytest.raises(NotPermitted):
            table.report(landing.token, P, [(0, 0, 3, 0, 4), bad])
    assert landing.missing == 2 * 12


def test_nothing_is_owed_beyond_the_prompt() -> None:
    landing = LandingTable().open(1, P, 5, [0, 1, 2], [7, 8, 9], frozenset(), frozenset(), G)
    assert landing.missing == 5 * 3


# -- pins --------------------------------------------------------------------------------------------------


def test_a_pinned_slot_is_not_claimed_and_a_claimed_one_not_read() -> None:
    pins = Pins(2)
    generation = pins.generation(0)
    with pins.pin(0, generation):
        assert not pins.claim(0)
        assert pins.generation(0) == generation
        assert pins.claim(1)
    assert pins.claim(0)
    with pytest.raises(StaleGeneration), pins.pin(0, generation):
        pass


# -- moves -------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> list[RunTuple]:
    out: list[RunTuple] = []
    for block in draw(st.lists(st.integers(0, 3), unique=True, max_size=4)):
        l0 = draw(st.integers(0, 2))
        t0 = draw(st.integers(0, 3))
        l1, t1 = draw(st.integers(l0 + 1, 3)), draw(st.integers(t0 + 1, 4))
        out.append((draw(st.integers(0, 5)), block, l0, l1, t0, t1))
    return out


@given(runs(), st.permutations(range(6)), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_moves_copy_exactly_the_runs(runs: list[RunTuple], slots: list[int], padded: bool) -> None:
    stride = G.slot_bytes + (16 if padded else 0)
    source = np.random.default_rng(0).integers(1, 256, 6 * stride, np.uint8)
    target, expected = np.zeros(6 * stride, np.uint8), np.zeros(6 * stride, np.uint8)
    for move in moves_of(runs, slots, stride, G):
        target[move.target : move.target + move.length] = source[move.source : move.source + move.length]
    for slot, block, l0, l1, t0, t1 in runs:
        for layer in range(l0, l1):
            at = layer * G.layer_bytes + t0 * G.token_bytes
            n = (t1 - t0) * G.token_bytes
            there, here = slots[block] * stride + at, slot * stride + at
            expected[there : there + n] = source[here : here + n]
    assert np.array_equal(target, expected)


def test_adjacent_whole_blocks_move_as_one() -> None:
    whole: list[RunTuple] = [(slot, slot - 1, 0, 3, 0, 4) for slot in (1, 2, 3)]
    (move,) = moves_of(whole, [4, 5, 6], G.slot_bytes, G)
    assert (move.source, move.target, move.length) == (G.slot_bytes, 4 * G.slot_bytes, 3 * G.slot_bytes)


@pytest.mark.parametrize(
    "run", [(6, 0, 0, 1, 0, 1), (-1, 0, 0, 1, 0, 1), (0, 4, 0, 1, 0, 1), (0, 0, 1, 1, 0, 1), (0, 0, 0, 4, 0, 1),
            (0, 0, 0, 1, 0, 5), (0, 0, 0, 1, 2, 2), (0, 0, -1, 1, 0, 1)],
)  # fmt: skip
def test_a_run_out_of_range_is_refused(run: RunTuple) -> None:
    with pytest.raises(MooncakeError):
        check_run(run, 6, 4, G)
