"""Promised room: never more than there is, whatever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.decode.room import Room
from shared.errors import DoesNotFit, NoRoom
from tests.examples import examples

A, B = ("a", 1), ("b", 1)


def test_promise_is_idempotent_and_released_once() -> None:
    room = Room(10, 16)
    assert room.promise(A, 20, 20) == 3
    assert room.promise(A, 20, 20) == 3
    assert (room.free, room.promised) == (7, 3)
    room.release(A)
    room.release(A)
    assert room.free == 10


def test_no_room_now_and_never() -> None:
    room = Room(10, 16, headroom=0.2)
    room.promise(A, 100, 10)
    with pytest.raises(NoRoom):
        room.promise(B, 16, 16)
    with pytest.raises(DoesNotFit):
        room.promise(B, 128, 1)


def test_expectation_beyond_the_pool_is_cut() -> None:
    assert Room(10, 16).promise(A, 16, 100_000) == 10


def test_growth_follows_what_is_held() -> None:
    room = Room(10, 16)
    room.promise(A, 16, 16)
    room.grow(A, 1)
    assert room.promised == 2
    room.grow(A, 12)
    room.grow(B, 5)  # not admitted: nothing to count
    assert (room.promised, room.free) == (12, 0)


class RoomMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 40), headroom=st.sampled_from([0.0, 0.1, 0.5]))
    def begin(self, total: int, headroom: float) -> None:
        self.room = Room(total, 4, headroom)
        self.mine: dict[tuple[str, int], int] = {}

    @rule(name=st.sampled_from("abcdef"), prompt=st.integers(1, 80), expected=st.integers(1, 80))
    def promise(self, name: str, prompt: int, expected: int) -> None:
        try:
            self.mine[name, 1] = self.room.promise((name, 1), prompt, expected)
        except (NoRoom, DoesNotFit):
            assert (name, 1) not in self.mine

    @rule(name=st.sampled_from("abcdef"))
    def release(self, name: str) -> None:
        self.room.release((name, 1))
        self.mine.pop((name, 1), None)

    @invariant()
    def sums_agree(self) -> None:
        if hasattr(self, "room"):
            assert self.room.promised == sum(self.mine.values()) <= self.room.limit
            assert self.room.free == self.room.limit - self.room.promised


TestRoom = RoomMachine.TestCase
TestRoom.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)
