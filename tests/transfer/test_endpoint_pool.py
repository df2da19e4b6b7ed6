"""ACCEPTANCE C10, the pure part: the endpoint pool against SIEVE as its authors wrote it, with busy members spared."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.transfer.endpoints import EndpointPool
from tests.examples import examples

PEERS = range(9)


@dataclass(eq=False)
class Node:
    key: int
    visited: bool = False
    older: Node | None = None
    newer: Node | None = None


class Sieve:
    """The model: a linked list from the newest to the oldest, and a hand that moves from old to new."""

    def __init__(self) -> None:
        self.newest: Node | None = None
        self.oldest: Node | None = None
        self.hand: Node | None = None
        self.nodes: dict[int, Node] = {}

    def insert(self, key: int) -> None:
        node = self.nodes[key] = Node(key, older=self.newest)
        if self.newest is not None:
            self.newest.newer = node
        self.newest = node
        self.oldest = self.oldest or node

    def remove(self, key: int) -> None:
        node = self.nodes.pop(key)
        if node is self.hand:
            self.hand = node.newer
        if node.newer is not None:
            node.newer.older = node.older
        else:
            self.newest = node.older
        if node.older is not None:
            node.older.newer = node.newer
        else:
            self.oldest = node.newer

    def evict(self, busy: set[int]) -> int | None:
        node = self.hand or self.oldest
        for _ in range(2 * len(self.nodes)):
            assert node is not None
            if not node.visited and node.key not in busy:
                self.hand = node.newer
                self.remove(node.key)
                return node.key
            node.visited = False
            node = node.newer or self.oldest
        self.hand = node
        return None


class Pool(RuleBasedStateMachine):
    """Peers connect, are used, become busy and idle, break. Everybody who waits is served in the end."""

    @initialize(cap=st.integers(1, 5))
    def begin(self, cap: int) -> None:
        self.cap = cap
        self.pool: EndpointPool[int] = EndpointPool(cap)
        self.model = Sieve()
        self.busy: set[int] = set()

    @rule(peer=st.sampled_from(PEERS))
    def connect(self, peer: int) -> None:
        if peer in self.model.nodes:
            self.model.nodes[peer].visited = True
            expected: tuple[bool, int | None] = (True, None)
        elif len(self.model.nodes) < self.cap:
            self.model.insert(peer)
            expected = (True, None)
        else:
            victim = self.model.evict(self.busy)
            if victim is not None:
                self.model.insert(peer)
            expected = (victim is not None, victim)
        assert self.pool.admit(peer, self.busy.__contains__) == expected
        assert expected[1] not in self.busy

    @rule(peer=st.sampled_from(PEERS))
    def use(self, peer: int) -> None:
        self.pool.touch(peer)
        if peer in self.model.nodes:
            self.model.nodes[peer].visited = True

    @precondition(lambda self: self.model.nodes)
    @rule(data=st.data())
    def begin_work(self, data: st.DataObject) -> None:
        self.busy.add(data.draw(st.sampled_from(sorted(self.model.nodes))))

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def end_work(self, data: st.DataObject) -> None:
        self.busy.remove(data.draw(st.sampled_from(sorted(self.busy))))

    @rule(peer=st.sampled_from(PEERS))
    def break_off(self, peer: int) -> None:
        """A link error, or a peer that restarted: also while it is busy."""
        self.pool.remove(peer)
        self.busy.discard(peer)
        if peer in self.model.nodes:
            self.model.remove(peer)

    @invariant()
    def both_have_the_same_members(self) -> None:
        members = {peer for peer in PEERS if peer in self.pool}
        assert members == self.model.nodes.keys()
        assert len(self.pool) == len(members) <= self.cap
        assert self.busy <= members

    def teardown(self) -> None:
        """Nobody is busy any more: whoever asks is let in at once."""
        if hasattr(self, "pool"):
            for peer in PEERS:
                assert self.pool.admit(peer, lambda _: False)[0]


TestPool = pytest.mark.timeout(300)(Pool.TestCase)
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)


@given(st.integers(1, 4), st.lists(st.sampled_from(PEERS), max_size=100))
def test_c10_more_peers_than_the_cap_are_all_served_and_none_leaks(cap: int, asking: list[int]) -> None:
    pool: EndpointPool[int] = EndpointPool(cap)
    connected: set[int] = set()
    for peer in asking:
        admitted, victim = pool.admit(peer, lambda _: False)
        assert admitted
        connected = (connected | {peer}) - {victim}
        assert len(connected) == len(pool) <= cap


@given(st.sets(st.sampled_from(PEERS), min_size=1, max_size=3), st.lists(st.sampled_from(PEERS), max_size=60))
def test_c10_active_ones_are_never_evicted(active: set[int], asking: list[int]) -> None:
    pool: EndpointPool[int] = EndpointPool(4)
    for peer in active:
        pool.admit(peer, lambda _: False)
    for peer in asking:
        assert pool.admit(peer, active.__contains__)[0]
        assert all(other in pool for other in active)


def test_c10_all_busy_means_not_now() -> None:
    pool: EndpointPool[int] = EndpointPool(2)
    assert [pool.admit(peer, lambda _: True) for peer in range(3)] == [(True, None), (True, None), (False, None)]
    assert pool.admit(2, lambda peer: peer == 0) == (True, 1)


def test_who_was_just_let_in_is_not_the_next_to_go() -> None:
    """The hand starts again with the oldest when it has passed the newest, whoever came in meanwhile."""
    pool: EndpointPool[str] = EndpointPool(3)
    for peer in "abc":
        pool.admit(peer, lambda _: False)
    pool.touch("a")
    pool.touch("b")
    assert pool.admit("d", lambda _: False) == (True, "c")
    assert pool.admit("e", lambda _: False) == (True, "a")


def test_a_scan_of_strangers_does_not_drive_out_who_is_used() -> None:
    pool: EndpointPool[int] = EndpointPool(8)
    for stranger in range(100, 300):
        for regular in range(4):
            pool.admit(regular, lambda _: False)
        pool.admit(stranger, lambda _: False)
    assert all(regular in pool for regular in range(4))
