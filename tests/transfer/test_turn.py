"""What a transfer that is carried on the loop may cost it: counted, on a clock of the test's."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer.sockets import receive_in_time, send_in_time
from services.store.transfer.turn import TURN, Turn


class Clock:
    """``now`` in seconds; every look at it takes ``tick``."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.looks = 0
        self._tick = tick

    def __call__(self) -> float:
        self.looks += 1
        self.now += self._tick
        return self.now


class Ready:
    """A socket that is ready after so many milliseconds, one number a wait; at the end never."""

    def __init__(self, clock: Clock, after: Iterator[float]) -> None:
        self._clock = clock
        self._after = after

    def poll(self, timeout: float | None = None, /) -> list[int]:
        assert timeout is not None and timeout == int(timeout) >= 0, "what is no whole millisecond is rounded up"
        needed = next(self._after, float("inf"))
        self._clock.now += min(timeout, needed) / 1000
        return [1] if needed <= timeout else []


@given(st.lists(st.floats(0, 3)), st.floats(0, 0.001), st.sampled_from([1.0, 5.0, float("inf")]))
def test_all_waits_of_a_turn_are_over_when_it_is(after: list[float], tick: float, most: float) -> None:
    clock = Clock(tick)
    turn, ready = Turn(clock=clock), Ready(clock, iter(after))
    began = clock.now
    while turn.wait(ready, most):
        pass
    assert clock.now - began <= TURN + tick + 1e-9


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection with little room."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    yield ends
    for end in ends:
        end.close()


TICK = TURN / 10


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_peer_that_takes_byte_by_byte_is_left_within_a_turn(
    pair: tuple[socket.socket, socket.socket], pieces: int
) -> None:
    ours, theirs = pair
    clock = Clock(TICK)
    turn = Turn(clock=clock)

    class Dripping:
        def poll(self, timeout: float | None = None, /) -> list[int]:
            theirs.recv(5000)
            return [1]

    data = memoryview(bytes(1 << 20))
    left = send_in_time(ours, [data] * pieces, lambda: turn.wait(Dripping()))
    assert sum(map(len, left)) > 0 and clock.looks <= 12


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_peer_that_sends_byte_by_byte_is_left_within_a_turn(
    pair: tuple[socket.socket, socket.socket], pieces: int
) -> None:
    ours, theirs = pair
    clock = Clock(TICK)
    turn, sent = Turn(clock=clock), 0

    class Dripping:
        def poll(self, timeout: float | None = None, /) -> list[int]:
            nonlocal sent
            sent += theirs.send(b"x" * 3)
            return [1]

    into = [bytearray(7) for _ in range(pieces)] + [bytearray(100)]
    left = receive_in_time(ours, [memoryview(buffer) for buffer in into], lambda: turn.wait(Dripping()))
    got = sum(map(len, into)) - sum(map(len, left))
    assert got == sent > 0 and b"".join(into) == b"x" * got + bytes(sum(map(len, left))) and clock.looks <= 12


def test_what_goes_without_waiting_looks_at_no_clock(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    clock = Clock()
    turn = Turn(clock=clock)
    looks = clock.looks

    class Never:
        def poll(self, timeout: float | None = None, /) -> list[int]:
            raise AssertionError

    into = bytearray(3000)
    assert send_in_time(ours, [b"a" * 1000, b"b" * 2000], lambda: turn.wait(Never())) == []
    assert receive_in_time(theirs, [memoryview(into)], lambda: turn.wait(Never())) == []
    assert into == b"a" * 1000 + b"b" * 2000 and clock.looks == looks
