"""The queue of a peer: never over its limit, in order, and nobody is forgotten."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.store.transfer.base import Op, Request
from services.store.transfer.room import Room, sizes
from services.store.transfer.wire import MAX_LENGTH
from shared.messages import Ref
from tests.examples import examples

LIMIT = 10


class Queue(RuleBasedStateMachine):
    """Takers that wait, give up and give back, against a list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.room = Room(LIMIT)
        self.holders: list[int] = []
        self.line: list[tuple[int, asyncio.Future[None]]] = []

    def teardown(self) -> None:
        self.loop.close()

    def settle(self) -> None:
        """Move whoever was granted from the line to the holders."""
        self.holders += [size for size, granted in self.line if granted.done() and not granted.cancelled()]
        self.line = [(size, granted) for size, granted in self.line if not granted.done()]

    @rule(size=st.integers(0, 2 * LIMIT))
    def take(self, size: int) -> None:
        fits = not self.line and (not sum(self.holders) or sum(self.holders) + size <= LIMIT)
        assert self.room.take(size) is fits
        if fits:
            self.holders.append(size)
        else:
            granted = self.loop.create_future()
            self.room.waiting.append((size, granted))
            self.line.append((size, granted))

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        if self.holders:
            self.room.give(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))
            before = [granted for _, granted in self.line]
            done = [granted.done() for granted in before]
            assert done == sorted(done, reverse=True)  # in order
            self.settle()

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.line:
            _, granted = self.line.pop(data.draw(st.integers(0, len(self.line) - 1)))
            granted.cancel()
            self.room.give(0)
            self.settle()

    @invariant()
    def never_over_its_limit(self) -> None:
        assert self.room.used == sum(self.holders)
        assert self.room.used <= LIMIT or len([size for size in self.holders if size]) == 1

    @invariant()
    def the_first_in_line_waits_for_a_reason(self) -> None:
        if self.line:
            assert self.room.used and self.room.used + self.line[0][0] > LIMIT


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=examples(60), stateful_step_count=30)


def test_sizes_are_by_peer_in_one_order_for_everybody() -> None:
    def ask(peer: str, length: int) -> Request:
        return Request(Op.READ, "pool", 0, Ref(peer, 1), "pool", 0, length)

    wanted = [ask("b", 5), ask("a", 1), ask("b", 2), ask("a", -3), ask("c", MAX_LENGTH + 1), ask("d", 0)]
    assert list(sizes(wanted).items()) == [(Ref("a", 1), 1), (Ref("b", 1), 7), (Ref("c", 1), 0), (Ref("d", 1), 0)]
